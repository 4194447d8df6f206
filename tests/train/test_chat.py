"""Conversations: rendered and tokenised as transformers does it, and what is none refused in a line."""

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from shardrt.__main__ import main
from shardrt.train import chat, chat_file
from shardrt.train.chat import ChatFolder, TooLong, conversation, fitted
from shardrt.train.chat_file import examples_of
from shardrt.train.filearray import FileArray
from shardrt.train.records import BadRecords
from shardrt.train.tokens import BadTokens
from tests.damage import damaged_bytes, damaged_json
from tests.lab import talks
from tests.lab.jobs import tool_refuses
from tests.lab.talks import CONVERSATIONS, NAMES, said, write

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name of a template -> its folder."""
    made = tmp_path_factory.mktemp("folders")
    return {name: talks.furnish(made / name, name) for name in (*NAMES, "marked")}


def read_examples(paths, folder):
    """The examples of records, by a file that is made of them."""
    with TemporaryDirectory() as made:
        return chat_file.make(Path(made) / "made.chat", paths, folder)


def decoded(folder, ids):
    """The text of tokens with the special ones, by the library."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder.tokenizer.path)).decode(list(ids), skip_special_tokens=False)


def encoded(path, record, **how):
    """(ids, which are answers) of a record."""
    folder = ChatFolder(path)
    (ids,), (answers,), _ = folder.encode([conversation(record, "here")], ["here"], **how)
    return folder, ids, answers


def answers_of(path, record):
    """The texts of neighbouring tokens that are answers."""
    folder, ids, answers = encoded(path, record)
    borders = np.flatnonzero(np.diff(answers, prepend=0, append=0)).reshape(-1, 2)
    return [decoded(folder, ids[first:last]) for first, last in borders]


# --- against the library ---


@pytest.fixture(scope="module")
def theirs(folders):
    """transformers' tokenizers of these folders."""
    transformers = pytest.importorskip("transformers")
    return {name: transformers.PreTrainedTokenizerFast.from_pretrained(p) for name, p in folders.items()}


@pytest.mark.parametrize("name", (*NAMES, "marked"))
def test_tokens_are_those_of_transformers(folders, theirs, name):
    for record in CONVERSATIONS:
        messages = record["messages"]
        expected = theirs[name].apply_chat_template(messages, tokenize=True, return_dict=False)
        folder, ids, _ = encoded(folders[name], record)
        assert ids.tolist() == expected
        expected = theirs[name].apply_chat_template(
            messages[:-1], tokenize=True, return_dict=False, add_generation_prompt=True
        )
        assert folder.prompt(messages[:-1]).tolist() == expected


def test_tools_and_their_json_are_those_of_transformers(folders, theirs):
    tools = [{"type": "function", "function": {"name": "\u00e9<b>", "description": "it's", "parameters": {}}}]
    record = CONVERSATIONS[0] | {"tools": tools}
    expected = theirs["chatml"].apply_chat_template(
        record["messages"], tools=tools, tokenize=True, return_dict=False
    )
    assert encoded(folders["chatml"], record)[1].tolist() == expected


def test_answers_that_a_template_marks_are_those_of_transformers(folders, theirs):
    for record in CONVERSATIONS:
        expected = theirs["marked"].apply_chat_template(
            record["messages"], return_assistant_tokens_mask=True, return_dict=True
        )
        _, ids, answers = encoded(folders["marked"], record)
        assert answers.tolist() == expected["assistant_masks"] and 0 < answers.sum() < ids.size


@pytest.mark.parametrize("name", (*NAMES, "marked"))
def test_texts_are_those_that_transformers_has_made(folders, name):
    """Also where it is not installed."""
    expected = json.loads((talks.TEMPLATES / "expected.json").read_text())[name]
    for record, text in zip(CONVERSATIONS, expected, strict=True):
        folder, ids, _ = encoded(folders[name], record)
        assert decoded(folder, ids) == text


ODD = {
    "loops, macros and sets": "{% macro m(x) %}[{{ x|upper }}]{% endmacro %}{% for x in messages %}"
    "{% if loop.first %}{% continue %}{% endif %}{% set y = x.content|trim %}{{ m(y) }}{% if y == 'five' %}"
    "{% break %}{% endif %}{% endfor %}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for x in messages %}{% set ns.n = ns.n + loop.index %}"
    "{% endfor %}{{ ns.n }} {{ dict(a=1, b=none) | tojson(indent=2) }} {{ messages[-1] | tojson }}",
    "lines": "{% if bos_token is defined %}\n   {{ bos_token }}\n  {% endif %}\n\n  x  {#- no -#}  \n"
    "{{- messages[0]['content'].split(' ')[-1] }}{{ pad_token }}{{ strftime_now('%') }}",
    "nothing": "{{ messages[0].reasoning_content }}{{ messages[0].nothing }}a",
}


@pytest.mark.parametrize("case", ODD)
def test_what_templates_can_use_is_what_transformers_gives_them(tmp_path, theirs, case):
    path = talks.furnish(tmp_path / "odd", template=ODD[case])
    for record in CONVERSATIONS:
        messages = [record["messages"][0] | {"thinking": "h", "name": None}, *record["messages"][1:]]
        expected = theirs["chatml"].apply_chat_template(
            messages, chat_template=ODD[case], return_dict=False, add_generation_prompt=True
        )
        assert ChatFolder(path).prompt(messages).tolist() == expected


# --- which tokens are answers ---


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("chatml", "", "<|im_end|>"),
        ("marked", "", "<|im_end|>"),
        ("llama3", "", "<|eot_id|>"),
        ("mistral", " ", "</s>"),
        ("zephyr", "", "</s>"),
    ],
)
def test_answers_are_what_the_assistant_says_and_the_token_that_ends_it(folders, name, begin, end):
    record = said("one", "two", "three", " four", system="seven")
    expected = [f"{begin}{text.strip() if name == 'llama3' else text}{end}" for text in ("two", " four")]
    assert answers_of(folders[name], record) == expected


def test_a_completion_is_the_answer_to_its_prompt(folders):
    assert answers_of(folders["chatml"], {"prompt": "one two", "completion": " three"}) == [
        " three<|im_end|>"
    ]
    prompt, completion = said("one", "two", "three")["messages"], [{"role": "assistant", "content": "four"}]
    for name in ("chatml", "marked"):
        found = answers_of(folders[name], {"prompt": prompt, "completion": completion})
        assert found == ["four<|im_end|>"]


def test_an_answer_of_weight_0_is_left_out_and_sharegpt_has_other_names(folders):
    record = said("one", "two", "three", "four")
    record["messages"][1]["weight"] = 0
    for name in ("chatml", "marked"):
        assert answers_of(folders[name], record) == ["four<|im_end|>"]
    turns = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]
    assert answers_of(folders["chatml"], {"conversations": turns}) == ["two<|im_end|>"]


PARTS = "{% for m in messages %}[{% for p in m.content %}{{ p.text }}{% endfor %}]{% endfor %}"
EITHER = (
    "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}]{% endfor %}"
)


def in_parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("template", [PARTS, EITHER])
def test_a_template_that_reads_parts_gets_them_as_transformers_gives_them(tmp_path, template):
    transformers = pytest.importorskip("transformers")
    record = said(in_parts("one ", "two"), in_parts("three"))
    path = talks.furnish(tmp_path / "model", template=template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    expected = theirs.apply_chat_template(record["messages"], tokenize=True, return_dict=False)
    folder, ids, answers = encoded(path, record)
    assert ids.tolist() == expected and decoded(folder, ids) == "[one two][three]"


@pytest.mark.parametrize("name", (*NAMES, "marked"))
def test_parts_are_one_text_for_other_templates(folders, name):
    _, ids, answers = encoded(folders[name], said(in_parts("What is ", "one?"), in_parts("two ", "three")))
    _, expected, same = encoded(folders[name], said("What is one?", "two three"))
    assert ids.tolist() == expected.tolist() and answers.tolist() == same.tolist()


def test_sharegpt_has_a_system_text_tools_in_json_and_either_names(folders):
    tools = [{"type": "function", "function": {"name": "f"}}]
    record = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    record |= {"system": "Be brief.", "tools": json.dumps(tools)}
    expected = encoded(folders["chatml"], said("a", "b", system="Be brief.", tools=tools))[1].tolist()
    assert encoded(folders["chatml"], record)[1].tolist() == expected
    mixed = {"conversations": [{"role": "user", "content": "a"}, {"from": "gpt", "value": "b"}]}
    plain = encoded(folders["chatml"], said("a", "b"))[1].tolist()
    assert encoded(folders["chatml"], mixed)[1].tolist() == plain
    named = {"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "tools": "[]"}
    assert encoded(folders["chatml"], named)[1].tolist() == plain


def test_the_end_of_a_turn_is_the_special_token_that_the_template_writes(folders, tmp_path):
    for name, end in (("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("mistral", "</s>")):
        folder = ChatFolder(folders[name])
        assert folder.end_of_turn() == [folder.tokenizer.token_to_id(end)]
    plain = talks.furnish(tmp_path / "plain", template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert ChatFolder(plain).end_of_turn() == []


def test_the_templates_of_a_list_are_chosen_by_name(tmp_path):
    path = talks.furnish(tmp_path / "two")
    (path / "chat_template.jinja").unlink()
    each = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": each}))
    folder = ChatFolder(path)
    record = {"messages": CONVERSATIONS[0]["messages"]}
    for more, expected in (({}, "a"), ({"tools": [{}]}, "b")):
        (ids,), _, _ = folder.encode([record | more], ["here"], prompt=True)
        assert decoded(folder, ids) == expected


# --- what is refused ---

HOSTILE = {
    "{{ 1": "line 1 of the template: unexpected end",
    "{% for i in range(10**9) %}{% endfor %}": "Range too big",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "too much time",
    "{% set x = ['aaaaaaaaaaaaaaaa' * 2**20] %}{% for i in range(99) %}{{ x[0] }}{% endfor %}": "characters",
    "{{ 'a' * 10**12 }}": "too much memory",
    "{{ 9**(9**9) }}": "too much time",
    "{{ messages.__class__.__mro__ }}": "unsafe",
    "{{ messages.append(1) }}": "is unsafe",
    "{{ lipsum.__globals__['os'].system('touch made') }}": "is unsafe",
    "{{ cycler.__init__.__globals__.os.popen('touch made') }}": "is unsafe",
    "{% set n = namespace(__class__=1) %}": "can't have the name",
    "{% include '/etc/passwd' %}": "no loader",
    "{{ raise_exception('system\nis not allowed') }}": "system\nis not allowed",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}": "memory",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "memory",
    "{{ messages[0].content.nothing.more }}": "'str object' has no attribute 'nothing'",
    "{{ '%20000000000d' % 1 }}": "memory",
    "{% generation %}{% generation %}{% endgeneration %}{% endgeneration %}": "lie in one another",
}


@pytest.mark.parametrize("template", HOSTILE, ids=lambda text: text[:30])
def test_hostile_templates_are_one_line_with_the_template_and_the_record(tmp_path, monkeypatch, template):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chat, "SECONDS", 0.3)
    path = talks.furnish(tmp_path / "bad", template=template)
    with pytest.raises(BadTokens) as caught:
        read_examples([write(tmp_path / "talks.jsonl", CONVERSATIONS)], ChatFolder(path))
    message = str(caught.value)
    assert HOSTILE[template] in message and str(path / "chat_template.jinja") in message
    early = template.startswith(("{{ 1", "{{ 9", "{{ (", "{{ 'a'", "{{ '%"))  # when it is compiled
    assert early or "talks.jsonl, line 1: " in message
    assert not (tmp_path / "made").exists()


def test_a_template_that_writes_earlier_messages_otherwise_later_is_refused_for_several_answers(tmp_path):
    text = "{% for m in messages %}{{ m.content if loop.last else 'old' }};{% endfor %}"
    path = talks.furnish(tmp_path / "thinks", template=text)
    with pytest.raises(BadTokens, match="here: .*jinja: message 2: .*mark answers with {% generation %}"):
        encoded(path, CONVERSATIONS[2])
    with pytest.raises(BadTokens, match="message 2: "):
        encoded(path, said("one", "two"))


RECORDS = [
    ("[1]", "expected a JSON object, got list"),
    ("{", "line 5: Expecting"),
    ('{"a": NaN}', "NaN is not valid JSON"),
    ("[" * 200 + "]" * 200, "nested more than 100 levels deep"),
    ("[" * 100000, "nested more than"),
    (
        '{"text": "a", "other": 1}',
        "expected 'messages', 'conversations', or 'prompt' and 'completion'; got 'text'",
    ),
    ("{}", "got none"),
    ('{"messages": []}', "messages must be a list of messages, not empty"),
    ('{"messages": {"role": "user"}}', "messages must be a list"),
    ('{"messages": ["hi"]}', "message 1: expected an object with role and content, got a str"),
    (
        '{"messages": [{"role": "robot", "content": ""}]}',
        "message 1: role must be one of system, developer, ",
    ),
    ('{"messages": [{"role": ["user"], "content": ""}]}', "message 1: role must be one of"),
    ('{"messages": [{"role": "user", "content": 1}]}', "message 1: content must be a text, got a int"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the assistant"),
    ('{"conversations": [{"from": "human"}]}', "message 1: content must be a text"),
    (
        '{"messages": [{"role": "assistant", "content": "a", "weight": "0"}]}',
        "message 1: weight must be 0 or 1",
    ),
    ('{"conversations": [1]}', "message 1: expected an object"),
    ('{"prompt": "a", "completion": [1]}', "prompt must be a list of messages"),
    ('{"prompt": "a"}', "got 'prompt'"),
    (json.dumps(said("a", "\ud800")), "surrogates not allowed"),
    (json.dumps(said("a", "a", tools=1)), "tools must be a list of objects, or its JSON"),
    (json.dumps(said("a", "a", tools=["f"])), "tools must be a list of objects, or its JSON"),
    (json.dumps(said("a", "a", tools="{")), "tools must be a list or its JSON (Expecting"),
    (json.dumps(said("a", "a", chat_template_kwargs={})), "chat_template_kwargs are not read"),
    (
        json.dumps(said("a", [{"type": "image", "url": "a.png"}])),
        "message 2: content has a part of type 'image'",
    ),
    (json.dumps(said([{"type": "image_url", "text": "a"}], "a")), "part of type 'image_url'; only texts are"),
    (json.dumps(said("a", ["b"])), "message 2: content has a part of type 'str'"),
    (
        json.dumps(said("a", [{"type": "text"}])),
        "message 2: content has a part of type 'text' without a text",
    ),
    (json.dumps(said("a", [])), "message 2: content must be a text, got a list"),
    ('{"messages": [{"role": "assistant", "tool_calls": "f"}]}', "message 1: tool_calls must be a list"),
    ('{"instruction": "a", "output": "b"}', "got 'instruction', 'output'"),
    ('{"prompt": "a", "chosen": "b", "rejected": "c"}', "got 'prompt', 'chosen', 'rejected'"),
]


@pytest.mark.parametrize(("line", "message"), RECORDS, ids=lambda text: text[:40])
def test_a_record_that_is_no_conversation_is_one_line_with_its_number(folders, tmp_path, line, message):
    file = write(tmp_path / "talks.jsonl", CONVERSATIONS)
    with open(file, "a") as more:
        more.write(f"\n{line}\n")
    with pytest.raises((BadTokens, BadRecords)) as caught:
        read_examples([file], ChatFolder(folders["chatml"]))
    assert str(caught.value).startswith(f"{file}, line 5: ") and message in str(caught.value)


def test_records_of_tables_are_those_of_lines(folders, tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder, given = ChatFolder(folders["chatml"]), [*CONVERSATIONS, {"prompt": "one", "completion": "two"}]
    columns = dict.fromkeys(("messages", "prompt", "completion"))
    table = [columns | record for record in given]
    parquet.write_table(pa.Table.from_pylist(table), tmp_path / "talks.parquet")
    found = read_examples([tmp_path / "talks.parquet"], folder)
    expected = read_examples([write(tmp_path / "talks.jsonl", given)], folder)
    assert found.digest == expected.digest and found.tokens.size > 50
    parquet.write_table(pa.Table.from_pylist([*table, columns | {"prompt": "a"}]), tmp_path / "talks.parquet")
    with pytest.raises(BadTokens, match="talks.parquet, row 4: expected 'messages'"):
        read_examples([tmp_path / "talks.parquet"], folder)


def test_damaged_lines_are_read_or_refused_in_a_line(folders, tmp_path, monkeypatch):
    chosen, folder, results = random.Random(0), ChatFolder(folders["chatml"]), []
    monkeypatch.setattr(folder.tokenizer, "close", lambda: None)  # one process is enough
    records = [*CONVERSATIONS, {"prompt": "a", "completion": "b"}]
    for number in range(500):
        record = chosen.choice(records)
        damaged = damaged_json(record, chosen)
        if number % 4 == 0:
            damaged = damaged_bytes(json.dumps(record).encode(), chosen)
        (tmp_path / "talks.jsonl").write_bytes(damaged)
        try:
            read_examples([tmp_path / "talks.jsonl"], folder)
            results.append(True)
        except (BadTokens, BadRecords) as error:
            assert "\n" not in str(error) and str(error).startswith(str(tmp_path))
            results.append(False)
    assert 0 < sum(results) < len(results)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "[]", "expected a JSON object, got a list"),
        ("tokenizer_config.json", "{", "not JSON as it should be"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template must be a text, or a list"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "chat_template must be a text"),
        ("tokenizer_config.json", '{"chat_template": []}', "chat_template must be a text"),
        ("tokenizer_config.json", "{}", "messages need a chat template, and"),
        ("chat_template.jinja", b"\xff", "not a chat template"),
        ("special_tokens_map.json", "1", "expected a JSON object"),
    ],
)
def test_a_folder_without_a_template_is_one_line(tmp_path, name, content, message):
    path = talks.furnish(tmp_path / "bad", "zephyr")
    (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadTokens) as caught:
        read_examples([write(tmp_path / "talks.jsonl", CONVERSATIONS)], ChatFolder(path))
    assert message in str(caught.value) and str(path) in str(caught.value)


# --- files of examples ---


@pytest.fixture
def made(folders, tmp_path, capsys):
    """A file that the command has made, and the records."""
    file, lines = tmp_path / "talks.chat", write(tmp_path / "talks.jsonl", CONVERSATIONS)
    assert main(["data", "chat", str(file), str(lines), "--init-from", str(folders["chatml"])]) == 0
    assert "3 examples, " in capsys.readouterr().out
    return file, lines


def test_a_file_of_examples_has_what_the_records_have(folders, made, capsys):
    file, lines = made
    folder = ChatFolder(folders["chatml"])
    found, expected = examples_of([file], folder), read_examples([lines], folder)
    for name in ("tokens", "answers", "begins", "largest", "digest", "made_by"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert isinstance(found.tokens, FileArray), "which is not read whole"
    assert main(["data", "check", str(file)]) == 0 and capsys.readouterr().out.endswith(", whole\n")
    with pytest.raises(
        BadTokens, match="talks.chat: made by tokenizer.json sha256 .*llama3 has tokenizer.json"
    ):
        examples_of([file], ChatFolder(folders["llama3"]))
    with pytest.raises(BadTokens, match="must be the only file"):
        examples_of([lines, file], folder)
    assert tool_refuses(capsys, "data", "chat", file, lines, "--init-from", folder.folder).endswith(
        "exists already"
    )
    wrong = tool_refuses(capsys, "data", "chat", "a.b", lines, "--init-from", folder.folder)
    assert wrong == "error: a.b: the name must end in .chat"


def test_records_are_tokenised_once_until_they_change(folders, made, tmp_path, monkeypatch):
    _, lines = made
    monkeypatch.chdir(tmp_path)
    folder, asked = ChatFolder(folders["chatml"]), []
    encode = ChatFolder.encode
    monkeypatch.setattr(ChatFolder, "encode", lambda *a, **how: asked.append(1) or encode(*a, **how))
    first = examples_of([lines], folder)
    again = examples_of([lines], folder)
    assert len(asked) == 1 and again.digest == first.digest == read_examples([lines], folder).digest
    write(lines, CONVERSATIONS[:2])
    assert examples_of([lines], folder).begins.size == 3
    assert examples_of([lines], ChatFolder(folders["llama3"])).digest != again.digest
    assert len(asked) == 4
    assert len(list((tmp_path / "runs" / ".tokens").glob("talks-*.chat"))) == 3


def test_damaged_files_of_examples_are_opened_or_refused_in_a_line(made):
    file, _ = made
    content, chosen, results = file.read_bytes(), random.Random(0), []
    for _ in range(500):
        file.write_bytes(damaged_bytes(content, chosen))
        try:
            found = chat_file.open_examples(file)
            fitted(found, 20, TooLong.truncate)
            chat_file.verify(file)
            results.append(True)
        except (BadTokens, OSError) as error:
            assert "\n" not in str(error) and str(file) in str(error)
            results.append(False)
    assert sum(results) < 0.1 * len(results)


# --- what fits ---


def of(*examples):
    """Examples from lists of 1 for answers; token i of all is i."""
    answers = np.concatenate(examples).astype(np.uint8)
    begins = np.cumsum([0, *map(len, examples)])
    return chat.Examples("", "", np.arange(answers.size, dtype=np.uint32), answers, begins, answers.size, "")


def test_an_example_ends_with_its_last_answer_and_is_cut_or_skipped_where_a_window_ends():
    given = of([0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1], [1, 0, 0], [0, 0, 0, 0, 0, 1], [0, 1])
    fit = fitted(given, 4, TooLong.truncate)
    assert fit.begins.tolist() == [0, 5, 20] and fit.sizes.tolist() == [2, 4, 1]
    assert fit.answers.tolist() == [2, 1, 1]
    assert (fit.truncated, fit.skipped) == (1, 2), (
        "the third has no answer behind a token; the fourth's is cut off"
    )
    fit = fitted(given, 4, TooLong.skip)
    assert fit.begins.tolist() == [0, 20] and (fit.truncated, fit.skipped) == (0, 3)


def test_examples_that_are_looked_at_in_parts_are_the_same(monkeypatch):
    random_bits = np.random.default_rng(0)
    given = of(*[random_bits.integers(0, 2, size) for size in random_bits.integers(1, 12, 100)])
    whole = fitted(given, 6, TooLong.truncate)
    monkeypatch.setattr(chat, "_TOGETHER", 7)
    parts = fitted(given, 6, TooLong.truncate)
    for name in ("begins", "sizes", "answers", "truncated", "skipped"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))


def test_a_template_that_marks_no_answer_and_files_without_records_are_one_line(tmp_path):
    template = "{% generation %}{% endgeneration %}{% for m in messages %}{{ m.content }}{% endfor %}"
    path, lines = talks.furnish(tmp_path / "m", template=template), write(tmp_path / "a.jsonl", CONVERSATIONS)
    with pytest.raises(BadTokens, match="a.jsonl: .*chat_template.jinja: no record has a token of an answer"):
        read_examples([lines], ChatFolder(path))
    lines.rename(tmp_path / "a.json")
    with pytest.raises(BadRecords, match="a.json: not a file of records"):
        read_examples([tmp_path / "a.json"], ChatFolder(path))


def test_without_jinja2_one_line_says_what_to_install(folders, monkeypatch):
    monkeypatch.setattr(chat, "find_spec", lambda name: None)
    with pytest.raises(BadTokens, match=r"pip install 'shardrt\[chat\]'"):
        ChatFolder(folders["chatml"])
