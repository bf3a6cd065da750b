"""Score methods on what people do: tool calls, and code completion, after long contexts.

    python -m extras.tasks make --checkpoint FOLDER --out tasks.jsonl
    python -m extras.tasks run --checkpoint FOLDER --tasks tasks.jsonl --out answers.jsonl \\
        --method sals --method kivi:bits=4
    python -m extras.tasks score --tasks tasks.jsonl --answers answers.jsonl --csv table.csv

`make` needs the packages that tasks are made of: `pip install --no-deps bfcl-eval` for the tool
calls, and `pip install networkx sympy more-itertools` for code. `run` needs no package and no
network, so it can be on another machine, with a GPU. `score` needs the packages again, in the
versions of `make`, and runs the code that the model wrote, in processes with limits of time and
memory, but in no sandbox.

Tool calls are cases of the Berkeley Function Calling Leaderboard (its categories simple_python,
multiple and live_multiple): a request, and the functions to choose from. Functions of other cases
stand among them, until the prompt is long. The leaderboard's own checker decides what is right.

Code: the body of a function is cut out of an installed package, and the model writes it after a
long part of the package's files. Its answer is begun for it, with the function's signature and
docstring, so that it goes straight on with the body. It is right if all examples in the docstring
(doctests) give what they say. The model sees only the first half of them.

Each prompt is a chat by the model's own template. Answers are greedy, so that a method's flips, the
cases whose outcome is not that of the dense model, are what its cache changed.
"""

import argparse
import ast
import dataclasses
import doctest
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple, get_origin

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import torch

from calibrate import add_command, result_options, save_csv, writable_file
from compress import replacing
from extras.evaluate import (
    Candidate,
    check_candidates,
    ledger,
    print_table,
    standard_error,
    with_baseline,
)
from extras.parallel import rank
from generate import Chat, Engine, Parser, ProgressLine, decode_tokens, encode_chat, whole
from model import (
    Tokenizer,
    UserError,
    fingerprint,
    load_config,
    load_tokenizer,
    weight_files,
)

CATEGORIES = ("simple_python", "multiple", "live_multiple")  # of the leaderboard
PACKAGES = ("networkx", "sympy", "more_itertools")
CODE = "code"  # the category of the other tasks


@dataclass
class Task:
    """A prompt, and what scoring its answer needs. A line of JSON in a file of tasks."""

    id: str
    category: str  # one of CATEGORIES, or CODE
    messages: Chat
    opening: str  # the beginning of the answer, which the model goes on with
    ids: list[int]  # the token ids of the messages and of the opening
    max_new_tokens: int
    scoring: dict  # ToolScoring's fields, or CodeScoring's

    def fingerprint(self) -> str:
        """Of the prompt: an answer tells by it what it is an answer to."""
        return hashlib.sha256(str(self.ids).encode()).hexdigest()[:16]


def parse_python(text: str, mode: str = "exec") -> ast.Module | ast.Expression | None:
    """What ast.parse makes of a text; None where it is no Python."""
    try:
        return ast.parse(text, mode=mode)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # whatever a model wrote
        return None


def encode_prompt(tokenizer: Tokenizer, messages: Chat, opening: str) -> list[int]:
    """The chat's token ids up to where the model answers, and those of its answer's beginning."""
    return encode_chat(tokenizer, messages) + tokenizer.encode_continuation(opening)


class Verdict(NamedTuple):
    """Is an answer right, and if not, why?"""

    is_right: bool
    reason: str = ""


class Writer:
    """Makes prompts of about `length` tokens, by a model's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, length: int, seed: int = 0):
        self.tokenizer = tokenizer
        self.length = length
        self.seed = seed

    def random(self, name: str) -> random.Random:
        """Random numbers of their own for each name."""
        return random.Random(f"{self.seed} {name}")

    @lru_cache(1 << 20)  # noqa: B019
    def count(self, text: str) -> int:
        """The tokens of a part of a prompt."""
        return len(self.tokenizer.encode_continuation(text))

    def encode(self, messages: Chat, opening: str = "") -> list[int]:
        return encode_prompt(self.tokenizer, messages, opening)

    def room(self, messages: Chat, opening: str = "") -> int:
        """How many tokens the prompt may still get; negative where it has too many."""
        return self.length - len(self.encode(messages, opening))


# -------------------------------------------------------------------------------------- tool calls


@dataclass
class ToolScoring:
    """What the leaderboard's checker needs of a case."""

    functions: list[dict]  # those that the case itself offers
    right_calls: list[dict]  # {name: {argument: [values that are right]}}


TOOLS_ABOVE = "You can call these functions. Each line describes one of them in JSON.\n\n"
TOOLS_BELOW = """
Answer the request of the user by a call of the one function that fits it. Your answer is one JSON \
object and nothing else, in this form:
{"name": "FUNCTION", "arguments": {"ARGUMENT": VALUE, "ARGUMENT": VALUE}}
"""

TOOL_TOKENS = 128  # that an answer may have
SMALLEST_TOOL = 40  # tokens of a line; hardly a function has fewer

# Words of functions' names that say little about what they do.
VERBS = set("add calc calculate check compute convert create find get list search set".split())


@lru_cache(None)
def import_bfcl() -> ModuleType:
    """The leaderboard's checker. UserError without the package bfcl-eval.

    The checker imports a registry of models, which imports the packages of many vendors. It asks
    the registry one thing: whether a model's function names have underscores instead of dots. A
    registry of one model stands in for it during the import."""
    if importlib.util.find_spec("bfcl_eval") is None:
        raise UserError("tool calls need a package: pip install --no-deps bfcl-eval")
    name = "bfcl_eval.constants.model_config"
    registry = ModuleType(name)
    registry.MODEL_CONFIG_MAPPING = {"local": SimpleNamespace(underscore_to_dot=False)}
    sys.modules[name] = registry
    try:
        from bfcl_eval.eval_checker.ast_eval import ast_checker
    finally:
        del sys.modules[name]
    return ast_checker


def bfcl_lines(file: str) -> list[dict]:
    """The JSON objects of one of the leaderboard's data files."""
    data = Path(import_bfcl().__file__).parents[2] / "data"
    with (data / file).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


class ToolCase(NamedTuple):
    """A case of the leaderboard."""

    id: str
    category: str
    messages: Chat
    scoring: ToolScoring


def bfcl_cases(category: str) -> list[ToolCase]:
    """All cases of a category."""
    answers = {}
    for line in bfcl_lines(f"possible_answer/BFCL_v4_{category}.json"):
        answers[line["id"]] = line["ground_truth"]
    cases = []
    for line in bfcl_lines(f"BFCL_v4_{category}.json"):
        messages = line["question"][0]  # of several turns, which these categories do not have
        scoring = ToolScoring(line["function"], answers[line["id"]])
        cases.append(ToolCase(line["id"], category, messages, scoring))
    return cases


def name_words(name: str) -> set[str]:
    """The words of a function's name that say what it does."""
    words = re.findall("[A-Z]?[a-z]+", name)
    return {word.lower() for word in words if len(word) > 2} - VERBS


def tool_messages(case: ToolCase, lines: list[str]) -> Chat:
    """The chat that asks a case, with the functions of these lines."""
    system = TOOLS_ABOVE + "\n".join(lines) + "\n" + TOOLS_BELOW
    messages = list(case.messages)
    if messages[0]["role"] == "system":
        system += "\n" + messages.pop(0)["content"]
    return [{"role": "system", "content": system}, *messages]


def tool_line(function: dict) -> str:
    return json.dumps(function, ensure_ascii=False)


def tool_task(case: ToolCase, others: list[dict], writer: Writer) -> Task | None:
    """A case with functions of other cases beside its own, in random order, until the prompt is
    full. None where its own functions alone are more.

    A function that may do what the right one does is left out: one whose name shares a word with
    the right one's."""
    rng = writer.random(case.id)
    lines = [tool_line(function) for function in case.scoring.functions]
    names = {function["name"] for function in case.scoring.functions}
    (right_name,) = case.scoring.right_calls[0]
    room = writer.room(tool_messages(case, lines))
    if room < 0:
        return None
    for function in rng.sample(others, len(others)):
        if room < SMALLEST_TOOL:
            break
        is_alike = name_words(function["name"]) & name_words(right_name)
        if function["name"] in names or is_alike:
            continue
        line = tool_line(function)
        n = writer.count(line + "\n")
        if n <= room:
            lines.append(line)
            names.add(function["name"])
            room -= n
    rng.shuffle(lines)
    messages = tool_messages(case, lines)
    ids = writer.encode(messages)
    return Task(
        id=case.id,
        category=case.category,
        messages=messages,
        opening="",
        ids=ids,
        max_new_tokens=TOOL_TOKENS,
        scoring=asdict(case.scoring),
    )


def tool_tasks(writer: Writer, counts: dict[str, int]) -> list[Task]:
    """Tasks of random cases, counts[category] of each category. UserError where it has fewer.

    Left out are cases whose right answer the leaderboard's own checker refuses; it has a few."""
    if not any(counts.values()):
        return []
    cases = {category: bfcl_cases(category) for category in CATEGORIES}
    functions = []
    for category in CATEGORIES:
        for case in cases[category]:
            functions += case.scoring.functions
    tasks = []
    with ProgressLine("tool calls", sum(counts.values())) as progress:
        for category in CATEGORIES:
            writer.random(category).shuffle(cases[category])
            left = counts[category]
            for case in cases[category]:
                if left == 0:
                    break
                task = tool_task(case, functions, writer)
                if task is not None and score_tools(task, right_answer(case.scoring)).is_right:
                    tasks.append(task)
                    left -= 1
                    progress.tick()
            if left:
                fault = f"{category}: {left} cases are missing"
                raise UserError(f"{fault}; ask for fewer, or for a larger --length")
    return tasks


class Call(NamedTuple):
    """A function call in an answer."""

    name: str
    arguments: dict


def json_values(text: str) -> Iterator[object]:
    """The JSON objects and lists in a text, one after another."""
    decoder = json.JSONDecoder()
    start = 0
    while True:
        opening = re.compile(r"[\[{]").search(text, start)
        if opening is None:
            return
        try:
            value, start = decoder.raw_decode(text, opening.start())
            yield value
        except (ValueError, RecursionError):
            start = opening.start() + 1


def call_of_json(value: object) -> Call | None:
    """{"name": ..., "arguments": {...}}, or the same by other names that models use."""
    if not isinstance(value, dict):
        return None
    name = value.get("name", value.get("function"))
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(name, str) and isinstance(arguments, dict):
        return Call(name, arguments)
    return None


def call_of_python(node: ast.expr) -> Call | None:
    """name(argument=value, ...) with values that are literals."""
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {}
    try:
        for keyword in node.keywords:
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        return Call(ast.unparse(node.func), arguments)
    except (ValueError, TypeError, RecursionError, MemoryError):  # whatever a model wrote
        return None


def parse_calls(text: str) -> list[Call]:
    """The calls of an answer: JSON objects, alone or in a list, or calls in Python. Text and code
    fences around them do no harm. [] where anything in the answer is no call."""
    calls = []
    for value in json_values(text):
        for part in value if isinstance(value, list) else [value]:
            calls.append(call_of_json(part))
    if not calls or None in calls:
        bare = re.sub(r"```\w*|</?tool_call>", "", text).strip()
        expression = parse_python(bare, "eval")
        if expression is None:
            return []
        nodes = [expression.body]
        if isinstance(expression.body, ast.List | ast.Tuple):
            nodes = expression.body.elts
        calls = [call_of_python(node) for node in nodes]
    return [] if None in calls else calls


def one_right(values: object) -> object:
    """A value of those that the leaderboard takes for right. Within dicts it again lists several;
    of "", which stands for leaving out, another one comes first."""
    if not isinstance(values, list):
        return values
    value = next((value for value in values if value != ""), "")
    if isinstance(value, dict):
        return {key: one_right(inner) for key, inner in value.items() if inner != [""]}
    if isinstance(value, list):
        return [one_right([item]) for item in value]
    return value


def right_answer(scoring: ToolScoring) -> str:
    """An answer that is right, with all arguments that may be given."""
    ((name, arguments),) = scoring.right_calls[0].items()
    given = {key: one_right(values) for key, values in arguments.items() if values != [""]}
    return json.dumps({"name": name, "arguments": given})


def score_tools(task: Task, text: str) -> Verdict:
    """By the leaderboard's checker. What cannot be read as a call is wrong."""
    checker = import_bfcl()
    scoring = ToolScoring(**task.scoring)
    calls = parse_calls(text)
    if not calls:
        return Verdict(False, "no call")
    try:
        result = checker.ast_checker(
            scoring.functions,
            [{call.name: call.arguments} for call in calls],
            scoring.right_calls,
            checker.Language.PYTHON,
            task.category,
            "local",
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # It takes some values of an unexpected type apart without a look at the type.
        return Verdict(False, f"the checker failed: {error!r}")
    return Verdict(result["valid"], "; ".join(map(str, result["error"])))


# -------------------------------------------------------------------------------------------- code


@dataclass
class CodeScoring:
    """Which function an answer replaces, and the examples that test it."""

    package: str
    version: str  # of the package
    module: str
    function: str
    source_hash: str  # of the module's file
    docstring: str


@dataclass
class Function:
    """A function of a package, that a task can be made of."""

    package: str
    module: str
    path: Path
    node: ast.FunctionDef
    source: str  # of the whole file

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def head(self) -> list[str]:
        """Its lines above the docstring: decorators and signature."""
        return self.source.split("\n")[first_line(self.node) - 1 : self.node.body[0].lineno - 1]

    @property
    def docstring(self) -> list[str]:
        """The docstring's lines, with its quotes."""
        docstring = self.node.body[0]
        return self.source.split("\n")[docstring.lineno - 1 : docstring.end_lineno]

    @property
    def body(self) -> list[str]:
        """The lines below the docstring."""
        return self.source.split("\n")[self.node.body[0].end_lineno : self.node.end_lineno]


# Examples may name a part of an output, and break its lines differently.
DOCTEST_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

TIME_LIMIT = 20  # seconds that the examples of a function may take, imports included
MEMORY_LIMIT = 4 << 30  # bytes
FILE_LIMIT = 16 << 20  # bytes that a file may get, its output included

# The program that tests a function: MODULE PATH EXAMPLES. The module is read from that path instead
# of its own; EXAMPLES is a file with the docstring.
TESTER = f"""
import doctest, importlib, importlib.util, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_LIMIT}, {MEMORY_LIMIT}))
    resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_LIMIT}, {FILE_LIMIT}))
except (ImportError, ValueError):  # Windows has no limits, and macOS not all of them
    pass
name, path, examples = sys.argv[1:]
docstring = open(examples, encoding="utf-8").read()

class Finder:
    @staticmethod
    def find_spec(wanted, path_of_package=None, target=None):
        if wanted == name:
            return importlib.util.spec_from_file_location(name, path)

sys.dont_write_bytecode = True
sys.meta_path.insert(0, Finder)
module = importlib.import_module(name)
parser = doctest.DocTestParser()
test = parser.get_doctest(docstring, dict(vars(module)), name, path, 0)
results = doctest.DocTestRunner(optionflags={DOCTEST_FLAGS}).run(test)
print("\\nRESULT", results.failed, "of", results.attempted)
"""

TESTER_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the order of sets
    "PYTHONIOENCODING": "utf-8",
    "OMP_NUM_THREADS": "1",  # a thread takes memory of the limit
    "OPENBLAS_NUM_THREADS": "1",
}

CODE_ABOVE = "Here is a part of the source code of {package}.\n\n"
CODE_BELOW = """
Complete the function {name} of {path}. Your answer is begun with its signature and docstring. Go \
on with its body, and end the code block after it.
"""
GAP = "\n# ...\n\n"  # where a file is cut
LONGEST_DOCSTRING = 40  # lines
LONGEST_BODY = 15  # lines
CODE_TOKENS = 384  # that an answer may have; the longest body has 228
SMALLEST_FILE = 50  # tokens that a file must have room for


def first_line(node: ast.stmt) -> int:
    """The number, from 1 on, of a statement's first line: of its first decorator, if it has one."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *[decorator.lineno for decorator in decorators]])


def names_defined(node: ast.stmt) -> set[str]:
    """The names that a statement of a module gives to things of the module or of its package."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    return set()


def names_used(nodes: list[ast.stmt]) -> set[str]:
    names = set()
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                names.add(part.id)
    return names


def package_folder(package: str) -> Path:
    """UserError where the package is not installed, or is no folder."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{package}: no such package is installed; pip install it, or name another")
    return Path(next(iter(spec.submodule_search_locations)))


def package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def package_files(package: str) -> list[Path]:
    """Its modules, in a fixed order, without tests and __init__.py."""
    folder = package_folder(package)
    files = []
    for path in sorted(folder.rglob("*.py")):
        inner = path.relative_to(folder)
        is_test = inner.name.startswith("test_") or {"test", "tests"} & set(inner.parts)
        if inner.name != "__init__.py" and not is_test:
            files.append(path)
    return files


def shown_docstring(function: Function) -> list[str] | None:
    """The docstring's lines without the second half of its examples, which the model cannot see.
    None where the examples cannot be told apart by lines, or are fewer than two."""
    lines = function.docstring
    docstring = ast.get_docstring(function.node, clean=False)
    try:
        examples = doctest.DocTestParser().get_examples(docstring)
    except ValueError:
        return None
    answered = [example for example in examples if example.want]
    if len(answered) < 2 or len(docstring.split("\n")) != len(lines):
        return None
    last_shown = answered[(len(answered) + 1) // 2 - 1]
    hidden = set()
    for example in examples:
        if example.lineno > last_shown.lineno:
            n = example.source.count("\n") + example.want.count("\n")
            hidden |= set(range(example.lineno, example.lineno + n))
    if len(lines) - 1 in hidden:  # it has the closing quotes, too
        return None
    shown = []
    for i, line in enumerate(lines):
        is_second_blank = shown and not line.strip() and not shown[-1].strip()
        if i not in hidden and not is_second_blank:
            shown.append(line)
    return shown


def uses_its_file(function: Function, tree: ast.Module) -> bool:
    """Does the body use a name that the file defines or imports from elsewhere in its package?"""
    around = set()
    for node in tree.body:
        if node is not function.node:
            around |= names_defined(node)
    return bool(names_used(function.node.body[1:]) & around)


def package_functions(package: str) -> list[Function]:
    """The functions that tasks can be made of. They are short, have examples, and use something of
    their file, so that the context matters."""
    functions = []
    for path in package_files(package):
        source = path.read_text(encoding="utf-8")
        inner = path.relative_to(package_folder(package)).with_suffix("")
        module = ".".join([package, *inner.parts])
        tree = parse_python(source)
        for node in tree.body if tree else ():
            if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node):
                continue
            function = Function(package, module, path, node, source)
            if not 1 <= len(function.body) <= LONGEST_BODY:
                continue
            if len(function.docstring) > LONGEST_DOCSTRING:
                continue
            # Pictures need more packages, and a code block in the docstring would end the answer's.
            if re.search("plot|```", ast.get_docstring(node)):
                continue
            if shown_docstring(function) is not None and uses_its_file(function, tree):
                functions.append(function)
    return functions


def opening_of(function: Function) -> str:
    """How an answer begins: a code block with all of the function above its body."""
    lines = [*function.head, *shown_docstring(function)]
    return "```python\n" + "\n".join(lines) + "\n"


def file_around(function: Function, room: int, writer: Writer) -> str:
    """The file without the function, or that much of it that has at most `room` tokens: first the
    imports and what the body uses, then what is near."""
    tree = ast.parse(function.source)
    lines = function.source.split("\n")
    used = names_used(function.node.body)
    pieces = []  # of the text, with the lines above each statement
    ranks = []
    start = 0
    for node in tree.body:
        pieces.append("\n".join(lines[start : node.end_lineno]))
        start = node.end_lineno
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_needed = is_import or bool(names_defined(node) & used)
        ranks.append((not is_needed, abs(node.lineno - function.node.lineno)))
    kept = set()
    for i in sorted(range(len(pieces)), key=lambda i: ranks[i]):
        is_function = first_line(tree.body[i]) == first_line(function.node)
        n = writer.count(pieces[i] + GAP)
        if not is_function and n <= room:
            kept.add(i)
            room -= n
    text = ""
    for i, piece in enumerate(pieces):
        if i in kept:
            text += piece + "\n"
        elif not text.endswith(GAP):
            text += GAP
    return text.strip("\n")


def code_block(path: str, text: str) -> str:
    return f"```python\n# {path}\n{text}\n```\n\n"


def first_lines(text: str, room: int, writer: Writer) -> str:
    """As many of a text's lines as have at most `room` tokens."""
    kept = []
    for line in text.split("\n"):
        room -= writer.count(line + "\n")
        if room < 0:
            break
        kept.append(line)
    return "\n".join(kept)


def code_task(function: Function, files: list[Path], writer: Writer) -> Task | None:
    """A task whose prompt is full of the package's files, of which the function's own comes last.
    The answer begins with the function without its body. None where that does not fit.

    files: the package's. Those of the function's folder come before others, in random order."""
    root = package_folder(function.package).parent
    path = str(function.path.relative_to(root))
    above = CODE_ABOVE.format(package=function.package)
    below = CODE_BELOW.format(path=path, name=function.name)
    opening = opening_of(function)

    def messages_of(blocks: list[str]) -> Chat:
        return [{"role": "user", "content": above + "".join(blocks) + below}]

    room = writer.room(messages_of([code_block(path, "")]), opening)
    if room < 0:
        return None
    blocks = [code_block(path, file_around(function, room, writer))]
    others = [file for file in files if file != function.path]
    name = f"{function.module}.{function.name}"
    writer.random(name).shuffle(others)
    others.sort(key=lambda file: file.parent != function.path.parent)
    for file in others:
        other_path = str(file.relative_to(root))
        room = writer.room(messages_of([code_block(other_path, ""), *blocks]), opening)
        if room < SMALLEST_FILE:
            break
        text = first_lines(file.read_text(encoding="utf-8"), room, writer)
        blocks.insert(0, code_block(other_path, text))
    messages = messages_of(blocks)
    scoring = CodeScoring(
        package=function.package,
        version=package_version(function.package),
        module=function.module,
        function=function.name,
        source_hash=source_hash(function.source),
        docstring=ast.get_docstring(function.node, clean=False),
    )
    return Task(
        id=name,
        category=CODE,
        messages=messages,
        opening=opening,
        ids=writer.encode(messages, opening),
        max_new_tokens=CODE_TOKENS,
        scoring=asdict(scoring),
    )


def source_hash(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def code_tasks(writer: Writer, packages: list[str], n_tasks: int) -> list[Task]:
    """Tasks of random functions, of the packages in turn. UserError where they have fewer."""
    functions = {}
    files = {}
    for package in packages if n_tasks else ():
        functions[package] = package_functions(package)
        files[package] = package_files(package)
        writer.random(package).shuffle(functions[package])
    tasks = []
    with ProgressLine("code", n_tasks) as progress:
        while len(tasks) < n_tasks:
            if not any(functions.values()):
                found = f"only {len(tasks)} functions have examples that pass"
                remedy = "name more packages, or ask for fewer"
                raise UserError(f"{' '.join(packages)}: {found}; {remedy}")
            for package in packages:
                task = None
                while task is None and functions[package] and len(tasks) < n_tasks:
                    function = functions[package].pop()
                    task = code_task(function, files[package], writer)
                    if task is not None and not is_tested(task, function):
                        task = None
                if task is not None:
                    tasks.append(task)
                    progress.tick()
    return tasks


def is_tested(task: Task, function: Function) -> bool:
    """Do the examples tell the right body from one that returns nothing? Twice, since some
    examples are random."""
    right = "\n".join(function.body)
    wrong = " " * function.node.body[0].col_offset + "return None"
    for _ in range(2):
        if not score_code(task, right).is_right:
            return False
    return not score_code(task, wrong).is_right


def answered_code(text: str) -> ast.Module:
    """The code block that a text, an opening with its answer, begins with. Where that is no Python,
    since the answer was cut or goes on with something else, its last lines are left out. The
    opening alone is Python, so that there is always the function."""
    block = text.split("```")[1].removeprefix("python\n")
    lines = block.split("\n")
    tree = None
    while tree is None:
        tree = parse_python("\n".join(lines))
        lines.pop()
    return tree


def replaced_source(source: str, name: str, answer: ast.Module) -> str:
    """A module's source with the answer's function in the place of its own.

    Imports and other functions of the answer come along. Decorators are those of the source."""
    beside = []
    for node in answer.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            written = node
        elif isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef):
            beside.append(ast.unparse(node))
    written.decorator_list = []
    lines = source.split("\n")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            own = node  # the last one of this name counts, as in Python
    before = lines[: first_line(own) - 1]
    decorators = lines[first_line(own) - 1 : own.lineno - 1]
    after = lines[own.end_lineno :]
    return "\n".join([*before, *beside, *decorators, ast.unparse(written), *after])


def score_code(task: Task, text: str, time_limit: float = TIME_LIMIT) -> Verdict:
    """Runs the function's examples with its body as the answer has it.

    UserError where the package is not the one that the task was made of."""
    scoring = CodeScoring(**task.scoring)
    source = module_source(scoring)
    answer = answered_code(task.opening + text)
    try:
        source = replaced_source(source, scoring.function, answer)
    except RecursionError:
        return Verdict(False, "it is nested too deeply")
    return run_examples(scoring, source, time_limit)


@lru_cache(None)
def source_of_module(package: str, module: str) -> str:
    inner = Path(*module.removeprefix(f"{package}.").split("."))
    path = package_folder(package) / inner.with_suffix(".py")
    if not path.is_file():
        return ""
    return path.read_text(encoding="utf-8")


def module_source(scoring: CodeScoring) -> str:
    """UserError where it has changed since the task was made."""
    source = source_of_module(scoring.package, scoring.module)
    if source_hash(source) != scoring.source_hash:
        made_with = f"the tasks were made with {scoring.package} {scoring.version}"
        here = f"here is {package_version(scoring.package)}"
        raise UserError(f"{scoring.module}: {made_with}, {here}; install that version")
    return source


def run_examples(scoring: CodeScoring, source: str, time_limit: float) -> Verdict:
    """Runs the examples in a process of its own, with this source of the module."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module = folder / "answered_module.py"
        examples = folder / "examples.txt"
        output = folder / "output.txt"
        module.write_text(source, encoding="utf-8")
        examples.write_text(scoring.docstring, encoding="utf-8")
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", TESTER, scoring.module, str(module), str(examples)],
                cwd=folder,
                env=os.environ | TESTER_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(time_limit)
            except subprocess.TimeoutExpired:
                return Verdict(False, f"no end after {time_limit:g} s")
            finally:
                end_with_children(process)
        printed = output.read_text(encoding="utf-8", errors="replace").strip()
    result = re.search(r"^RESULT (\d+) of (\d+)\Z", printed, re.MULTILINE)
    if process.returncode or result is None:
        last_line = printed.split("\n")[-1]
        return Verdict(False, f"exit code {process.returncode}: {last_line}")
    if result[1] != "0":
        return Verdict(False, f"{result[1]} of {result[2]} examples fail")
    return Verdict(True)


def end_with_children(process: subprocess.Popen) -> None:
    """Ends a process and what it has started, if anything of it still runs."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:  # Windows
        process.kill()
    process.wait()


# ----------------------------------------------------------------------------------------- answers


@dataclass
class Answer:
    """What a method answered to a task. A line of JSON in a file of answers."""

    method: str  # as on the command line
    id: str  # the task's
    fingerprint: str  # of the prompt
    text: str
    n_tokens: int
    costs: dict[str, float]  # "bytes/token" and the like, of `ledger`
    weights: str = ""  # the model's fingerprint, which older files do not have


def read_json_lines(path: Path, kind: type) -> list:
    """The objects of a file with one a line. UserError where a line is none of this kind."""
    objects = []
    for i, line in enumerate(generate.read_text(path).splitlines()):
        try:
            x = kind(**json.loads(line))
        except (TypeError, ValueError):
            x = None
        if x is None or not has_its_types(x):
            raise UserError(f"{path}: line {i + 1} is no {kind.__name__.lower()}")
        objects.append(x)
    return objects


def has_its_types(x: object) -> bool:
    """Whether the fields of a dataclass hold what they are declared as: text, a number, a list."""
    for f in dataclasses.fields(x):
        kind = get_origin(f.type) or f.type  # of list[int] it is list
        if not isinstance(getattr(x, f.name), kind):
            return False
    return True


def read_answers(path: Path, tasks: list[Task]) -> list[Answer]:
    """The answers to these tasks. UserError where one is the answer to another prompt."""
    by_id = {task.id: task for task in tasks}
    answers = []
    for answer in read_json_lines(path, Answer):
        task = by_id.get(answer.id)
        if task is None or task.fingerprint() != answer.fingerprint:
            fault = f"{path}: its answer to {answer.id} is to none of these prompts"
            raise UserError(f"{fault}; use the file of tasks that it was made with, or a new one")
        answers.append(answer)
    return answers


def check_same_model(
    answers: list[Answer], candidates: list[Candidate], args: argparse.Namespace
) -> None:
    """Raises UserError where the answers of a candidate's name are those of another model."""
    for candidate in candidates:
        weights = fingerprint(weight_files(candidate.folder or args.checkpoint))
        for answer in answers:
            if answer.method == candidate.label and answer.weights not in ("", weights):
                fault = f"{args.out}: its answers of {answer.method} are another model's"
                raise UserError(f"{fault}; give another --out")


def drop_half_line(path: Path) -> None:
    """Takes off what a run that was killed left of its last line. A line that is no answer's stays,
    for read_answers to refuse."""
    if path.is_file():
        before, newline, half = path.read_bytes().rpartition(b"\n")
        if half.startswith(b"{"):
            os.truncate(path, len(before + newline))


def answer_batch(engine: Engine, tokenizer: Tokenizer, tasks: list[Task]) -> list[list[int]]:
    """Greedy answers to tasks of one kind (`batches`), one in each of the first rows.

    An answer ends with the model's stop token, or where its first code block has ended, which the
    opening may have begun."""
    fences = 2
    if tasks[0].opening:
        fences = 1

    def stops(ids: list[int]) -> bool:
        if ids[-1] in tokenizer.stop_ids:
            return True
        # One token late, since the last one may hold more than the end of the block.
        if "```" not in tokenizer.decode(ids[-9:-1]):
            return False
        return tokenizer.decode(ids[:-1]).count("```") >= fences

    idle = [[]] * (engine.context.batch_size - len(tasks))
    engine.prefill([task.ids for task in tasks] + idle)
    most = tasks[0].max_new_tokens
    answers = [[] for _ in tasks]
    for token in decode_tokens(engine, most, stops, stride=16, rows=len(tasks)):
        if not token.is_stop:
            answers[token.row].append(token.id)
    return answers


def answer_text(tokenizer: Tokenizer, task: Task, ids: list[int]) -> str:
    """The text of an answer. What goes on with an opening keeps the space that it begins with;
    without an opening a tokenizer may leave it out."""
    return tokenizer.decode(ids, after=tokenizer.encode_continuation(task.opening))


def batches(tasks: list[Task], rows: int) -> Iterator[list[Task]]:
    """At most `rows` tasks each, of one kind: one max_new_tokens, with or without an opening."""
    kinds = {}
    for task in tasks:
        kinds.setdefault((task.max_new_tokens, bool(task.opening)), []).append(task)
    for kind in sorted(kinds):
        for first in range(0, len(kinds[kind]), rows):
            yield kinds[kind][first : first + rows]


def answer_tasks(
    candidate: Candidate,
    args: argparse.Namespace,
    tasks: list[Task],
    capacity: int,
    longest: int,
) -> None:
    """Adds a candidate's answers to the file args.out, batch by batch.

    capacity: of a row of the cache. longest: tokens of the prompt whose bytes they say."""
    tokenizer = load_tokenizer(args.checkpoint)
    rows = min(args.rows, len(tasks))
    engine = candidate.engine(args, rows, capacity, least=1)
    costs = ledger(engine, longest)
    with ProgressLine(candidate.label, len(tasks)) as progress:
        for batch in batches(tasks, engine.context.batch_size):
            lines = ""
            made = answer_batch(engine, tokenizer, batch)
            for task, ids in zip(batch, made, strict=True):
                answer = Answer(
                    method=candidate.label,
                    id=task.id,
                    fingerprint=task.fingerprint(),
                    text=answer_text(tokenizer, task, ids),
                    n_tokens=len(ids),
                    costs=costs,
                    weights=engine.model.fingerprint,
                )
                lines += json.dumps(asdict(answer)) + "\n"
            if rank() == 0:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(lines)
            progress.tick(len(batch))


# ---------------------------------------------------------------------------------------- verdicts


def verdicts_on(tasks: dict[str, Task], answers: list[Answer]) -> list[Verdict]:
    """Of each answer. Equal answers to a task are tested once."""
    texts = sorted({(answer.id, answer.text) for answer in answers})
    if any(tasks[task_id].category != CODE for task_id, _ in texts):
        import_bfcl()

    def verdict_on(task_and_text: tuple[str, str]) -> Verdict:
        task_id, text = task_and_text
        task = tasks[task_id]
        return score_code(task, text) if task.category == CODE else score_tools(task, text)

    found = {}
    with ProgressLine("scored", len(texts)) as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        for pair, verdict in zip(texts, pool.map(verdict_on, texts), strict=True):
            found[pair] = verdict
            progress.tick()
    return [found[answer.id, answer.text] for answer in answers]


@dataclass
class Judged:
    """An answer with its verdict. A line of --verdicts."""

    method: str
    id: str
    is_right: bool
    reason: str
    text: str


def kind_of(task: Task) -> str:
    """Which columns of the table a task counts in."""
    return CODE if task.category == CODE else "tools"


def result_row(
    method: str,
    outcomes: dict[str, bool],
    dense: dict[str, bool],
    tasks: dict[str, Task],
    costs: dict[str, float],
) -> dict:
    """A row of the table. "tools" and "code" are per cent right, with "±", the standard error.
    "flips": the per cent of cases whose outcome is not the dense model's.

    outcomes, dense: is the answer to a task right, by the task's id."""
    row = {"method": method}
    for kind in ("tools", CODE):
        ids = [task_id for task_id in outcomes if kind_of(tasks[task_id]) == kind]
        shared = [task_id for task_id in ids if task_id in dense]
        if ids:
            right = torch.tensor([outcomes[task_id] for task_id in ids], dtype=torch.float64)
            row[kind] = 100 * right.mean().item()
            row[f"{kind} ±"] = 100 * standard_error(right)
        if shared:
            flips = sum(outcomes[task_id] != dense[task_id] for task_id in shared)
            row[f"{kind} flips"] = 100 * flips / len(shared)
    row.update(costs)
    for category in CATEGORIES:
        right = [outcomes[task_id] for task_id in outcomes if tasks[task_id].category == category]
        if right:
            row[category] = 100 * sum(right) / len(right)
    row["answers"] = len(outcomes)
    return row


# -------------------------------------------------------------------------------- the command line


def write_lines(path: Path, objects: list) -> None:
    """Writes dataclasses, a line of JSON each, in the place of an older file."""
    path = path.resolve()  # what a link points to
    with replacing(path.parent, path.name) as folder:
        with (folder / path.name).open("w", encoding="utf-8") as file:
            for x in objects:
                file.write(json.dumps(asdict(x)) + "\n")


def run_make(args: argparse.Namespace) -> None:
    """Write the prompts, and what scoring needs, into one file.

    The same options, packages and seed give the same file."""
    writer = Writer(load_tokenizer(args.checkpoint), args.length, args.seed)
    writer.encode([{"role": "user", "content": "Hello"}])  # is there a chat template?
    counts = {
        "simple_python": args.simple,
        "multiple": args.multiple,
        "live_multiple": args.live_multiple,
    }
    tasks = tool_tasks(writer, counts) + code_tasks(writer, args.packages, args.code)
    write_lines(args.out, tasks)
    lengths = [len(task.ids) for task in tasks] or [0]
    print(f"{args.out}: {len(tasks)} tasks, of {min(lengths)} to {max(lengths)} tokens")


def run_run(args: argparse.Namespace) -> None:
    """Answer the tasks through each method's cache, greedily; the dense model first.

    A run that ended early goes on where it was: answers in the file are not made again."""
    candidates = [Candidate.parse(text, args.weights) for text in args.method or ["sals"]]
    config = load_config(args.checkpoint)
    candidates = with_baseline(candidates, args.weights, config.elitekv)
    tasks = read_json_lines(args.tasks, Task)
    if not tasks:
        raise UserError(f"{args.tasks} has no tasks; make some")
    first = tasks[0]
    if encode_prompt(load_tokenizer(args.checkpoint), first.messages, first.opening) != first.ids:
        raise UserError(f"{args.tasks} was made for another model; make it with this --checkpoint")
    # Budgets may be fractions of the capacity, so that it is the same whatever is left to do, and
    # so is the prompt whose bytes are counted.
    capacity = max(len(task.ids) + task.max_new_tokens for task in tasks)
    longest = max(len(task.ids) for task in tasks)
    generate.check_capacity(capacity, config, "the prompts: make them with a smaller --length")
    drop_half_line(args.out)
    done = set()
    if args.out.is_file():
        answers = read_answers(args.out, tasks)
        check_same_model(answers, candidates, args)
        done = {(answer.method, answer.id) for answer in answers}
    if args.limit:
        tasks = first_of_each(tasks, args.limit)
    check_candidates(candidates, args, {capacity: 1})
    for candidate in candidates:
        left = [task for task in tasks if (candidate.label, task.id) not in done]
        if left:
            answer_tasks(candidate, args, left, capacity, longest)


def first_of_each(tasks: list[Task], n: int) -> list[Task]:
    """The first n tasks of each category."""
    first = []
    for category in (*CATEGORIES, CODE):
        first += [task for task in tasks if task.category == category][:n]
    return first


def run_score(args: argparse.Namespace) -> dict:
    """Print the table: right answers and flips of each method, with the bytes of its cache.

    Right answers are in per cent, with their standard error (±). Flips are the per cent of cases
    whose outcome is not that of the dense model, better or worse."""
    tasks = {task.id: task for task in read_json_lines(args.tasks, Task)}
    answers = read_answers(args.answers, list(tasks.values()))
    verdicts = verdicts_on(tasks, answers)
    outcomes = {}  # of each method, in the order of the file
    costs = {}
    for answer, verdict in zip(answers, verdicts, strict=True):
        outcomes.setdefault(answer.method, {})[answer.id] = verdict.is_right
        costs[answer.method] = answer.costs
    rows = []
    for method, own in outcomes.items():
        rows.append(result_row(method, own, outcomes.get("dense", {}), tasks, costs[method]))
    if not rows:
        raise UserError(f"{args.answers} has no answers")
    columns = all_columns(rows)
    if args.csv:
        save_csv(args.csv, columns, rows)
    if args.verdicts:
        lines = []
        for answer, verdict in zip(answers, verdicts, strict=True):
            lines.append(Judged(answer.method, answer.id, *verdict, answer.text))
        write_lines(args.verdicts, lines)
    print_table(rows, columns[1:])
    return {"rows": rows}


def all_columns(rows: list[dict]) -> list[str]:
    """The columns of all rows."""
    columns = []
    for row in rows:
        for column in row:
            if column not in columns:
                columns.append(column)
    return columns


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    make = add_command(commands, "make", run_make)
    about = "the model's folder, for its tokenizer and chat template"
    make.option("--checkpoint", Path, None, about, required=True, metavar="FOLDER")
    make.option("--out", writable_file, None, "the file of tasks", required=True, metavar="FILE")
    make.option("--length", whole(1), 4000, "tokens of a prompt, about", metavar="N")
    make.option("--seed", whole(0), 0, "of the choice of cases, and of what is beside them")
    make.option("--simple", whole(0), 150, "cases with one function of their own", metavar="N")
    make.option("--multiple", whole(0), 100, "cases with several", metavar="N")
    about = "such cases that users of a service have written"
    make.option("--live_multiple", whole(0), 150, about, metavar="N")
    make.option("--code", whole(0), 150, "functions to complete", metavar="N")
    about = "installed packages whose functions they are"
    make.option("--packages", str, PACKAGES, about, nargs="+", metavar="NAME")

    run = add_command(commands, "run", run_run)
    generate.add_model_options(run)
    generate.add_weights_option(run)
    run.option("--tasks", Path, None, "the file that make wrote", required=True, metavar="FILE")
    about = "as sals:rank=0.125,bits=2; repeat it (default: sals; dense is always there)"
    run.option("--method", str, None, about, action="append", metavar="NAME[:SETTING=VALUE,...]")
    about = "the file that answers are added to"
    run.option("--out", writable_file, None, about, required=True, metavar="FILE")
    about = "prompts in a batch, fewer where the memory holds no more"
    run.option("--rows", whole(1), 32, about, metavar="N")
    about = "only the first N tasks of each category"
    run.option("--limit", whole(1), None, about, metavar="N")

    score = add_command(commands, "score", run_score)
    score.option("--tasks", Path, None, "the file that make wrote", required=True, metavar="FILE")
    score.option("--answers", Path, None, "the file of run", required=True, metavar="FILE")
    about = "also write whether each answer is right, and why not, a line of JSON each"
    score.option("--verdicts", writable_file, None, about, metavar="FILE")
    result_options(score)
    return parser.parse_args(argv)


def main() -> None:
    # Sources of packages, and answers, may have odd escapes in their strings.
    warnings.simplefilter("ignore", SyntaxWarning)
    args = parse_args(sys.argv[1:])
    figures = args.run(args)
    if figures and args.json:
        report = {"command": " ".join(sys.argv), "torch": torch.__version__, **figures}
        print(json.dumps(report))


if __name__ == "__main__":
    generate.run_command(main)
