"""Models in the form of Hugging Face: config.json and safetensors, in and out."""
