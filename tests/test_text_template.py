"""Chat templates: what they may use, what they may not, where they are found."""

import builtins
import datetime
import json

import jinja2
import pytest
import template_cases as cases

from rods_jax.text.template import load_template, make_template

ASK = [{"role": "user", "content": "hi"}]


def render(text, **variables):
    return make_template(text, "t.jinja").render(ASK, **variables)


@pytest.mark.parametrize("name", sorted(cases.FAMILIES))
def test_whole_dialogues_are_as_plain_jinja_renders_them(name):
    bos = cases.FAMILIES[name].bos
    template = make_template(cases.source(name), name, {"bos_token": bos} if bos else None)
    for script in (*cases.SCRIPTS.values(), cases.THOUGHTS):
        messages, tools = cases.written_out(script)
        for generate in (False, True):
            assert template.render(messages, tools or None, generate, enable_thinking=False) == (
                cases.render(name, messages, tools, generate, enable_thinking=False))


def test_json_is_written_as_templates_expect_it():
    value = {"b": "<é😀\x7f&'\">", "a": [1.5, None, True]}
    for options in ({}, {"indent": 4}, {"sort_keys": True}, {"separators": (",", ":")},
                    {"ensure_ascii": True}, {"ensure_ascii": True, "indent": 1}):
        given = ", ".join(f"{key}={item!r}" for key, item in options.items())
        assert render("{{ v|tojson(%s) }}" % given, v=value) == json.dumps(
            value, **{"ensure_ascii": False, **options})
    # What stands for another character comes through, or as that one would (see guard.py).
    assert render("{{ v|tojson(ensure_ascii=true) }}", v="\ud841é") == '"\ud841\\u00e9"'
    assert render("{{ v|tojson }}", v="\ud80a\ud822") == '"\\n\\\ud822"'


def test_what_templates_use_beside_plain_jinja():
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}"
                  "{% if i == 3 %}{% break %}{% endif %}{% endfor %}") == "13"
    assert render("{% generation %}\n{% set x = 1 %}{{ messages[0].content }}\n"
                  "{% endgeneration %}{{ x is defined }}") == "hi\nFalse"
    assert render("{% set ns = namespace(self=1) %}{% set ns.x = 2 %}{{ ns.self + ns.x }}") == "3"
    assert render("  {% if true %}\n  a\n  {% endif %}\n") == "  a\n"
    assert render("{{ tools is none }}{{ add_generation_prompt }}{{ x }}.", x=3) == "TrueFalse3."
    assert render("{{ range(3)|list }}{{ 'ab' * 2 }}{{ 2 ** 5 }}{{ 3 * 4 }}") == (
        "[0, 1, 2]abab3212")


def test_the_date_is_fixed():
    text = "{{ strftime_now('%d %b %Y') }}"
    assert render(text) == "26 Jul 2024"
    day = datetime.datetime(2031, 2, 3)
    assert make_template(text, now=day).render(ASK) == "03 Feb 2031"


def test_special_tokens_are_there_or_cannot_be_written():
    text = "{% if bos_token is defined and bos_token %}{{ bos_token }}{% endif %}{{ eos_token }}"
    assert make_template(text, "t", {"bos_token": "<s>", "eos_token": "</s>"}).render([]) == (
        "<s></s>")
    with pytest.raises(ValueError, match="t.jinja line 1: it writes eos_token, which"):
        render(text)
    assert render("{% if bos_token %}x{% endif %}y") == "y"


@pytest.mark.parametrize("text, reason", [
    ("a\n{{ x.y }}", "line 2: 'x' is undefined"),
    ("a\n\n{{ messages[0].content + 1 }}", "line 3: can only concatenate str"),
    ("{{ raise_exception('No\nway') }}", "line 1: No way$"),
    ("{{ ().__class__.__mro__ }}", "line 1: access to attribute '__class__' of 'tuple'.* unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ messages[0].update({}) }}", "unsafe"),
    ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "cannot be set"),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
     "over 1000000 steps"),
    ("{% for i in range(300) %}{{ 'x' * 100000 }}{% endfor %}", "over 20000000 characters"),
    ("{{ 'ab' * 999999999 }}", "a product of over"),
    ("{{ 999999999 * [1] }}", "a product of over"),
    ("{{ 9 ** 99999 }}", "a power over"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ("{% include 'x' %}", "no loader"),
    ("{{ v|tojson }}", "line 1: Object of type .*Undefined is not JSON"),
])
def test_what_goes_wrong_is_said_in_one_line_with_its_place(text, reason):
    with pytest.raises(ValueError, match=f"^t.jinja.*{reason}") as caught:
        render(text)
    assert "\n" not in str(caught.value) and not isinstance(caught.value, jinja2.TemplateError)


def test_a_bound_counts_one_rendering_alone():
    template = make_template("{% for i in range(600000) %}{% endfor %}x")
    assert [template.render(ASK), template.render(ASK)] == ["x", "x"]


def test_syntax_errors_name_file_and_line():
    for text, line in (("a\n\n{% if %}", 3), ("{{ x|nope }}", 1), ("{% generation %}", 1)):
        with pytest.raises(ValueError, match=f"^t.jinja line {line}: "):
            make_template(text, "t.jinja")


@pytest.mark.parametrize("text", [
    "{% break %}",
    "{% for x in [1] %}{% macro m() %}{% continue %}{% endmacro %}{% endfor %}",
    "{% for a in [1] %}" * 101 + "{% endfor %}" * 101,
])
def test_what_python_cannot_run_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match="^t.jinja cannot be run: .*(loop|indentation)") as caught:
        make_template(text, "t.jinja")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------ files


def test_the_first_file_that_has_a_template_counts(tmp_path):
    def loaded():
        template = load_template(tmp_path)
        return template.render([]), template.name

    with pytest.raises(ValueError, match="has no chat_template.jinja"):
        load_template(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    with pytest.raises(ValueError, match="has no chat_template.jinja"):
        load_template(tmp_path)
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None,
                                  "chat_template": "a{{ bos_token }}"}))
    assert loaded() == ("a<s>", str(config))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "b"}))
    assert loaded() == ("b", str(tmp_path / "chat_template.json"))
    (tmp_path / "chat_template.jinja").write_text("c{{ bos_token }}é")
    assert loaded() == ("c<s>é", str(tmp_path / "chat_template.jinja"))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("d")
    assert loaded()[0] == "d"


def test_of_named_templates_the_one_for_tools_counts(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    for value, text in ((named, "a"), ([*named, {"name": "tool_use", "template": "c"}], "c")):
        path.write_text(json.dumps({"chat_template": value}))
        assert load_template(tmp_path).render([]) == text
    for value in (named[1:], [], 3):
        path.write_text(json.dumps({"chat_template": value}))
        with pytest.raises(ValueError, match="tokenizer_config.json: chat_template is neither"):
            load_template(tmp_path)


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    for data, reason in ((b"{", "is not JSON"), (b"[]", "holds no JSON object"),
                         (b"\xff", "is not UTF-8"), (b"[" * 99999, "nests too deep")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"tokenizer_config.json {reason}") as caught:
            load_template(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="chat_template.jinja cannot be read"):
        load_template(tmp_path)


def test_a_missing_or_leaky_package_is_named_with_its_remedy(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "jinja2":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without)
        with pytest.raises(ValueError, match="pip install jinja2"):
            make_template("x")
    monkeypatch.setattr(jinja2, "__version__", "3.1.5")
    with pytest.raises(ValueError, match="pip install -U jinja2"):
        make_template("x")
