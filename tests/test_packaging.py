"""The package as users get it: wheel, editable install, bare checkout.

`transforms/` lies at the root of the checkout and installs as `augtree_fx.transforms`. Each way of getting the package
must find it there, and must leave a user's own `transforms.py` alone. Everything runs on a copy of the tree, in fresh
interpreters.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
# Of `examples/` only the packages in it are shipped, not the scripts beside them.
NOT_SHIPPED = {"tests", "build", "dist"}
SCRIPTS = ROOT / "examples"

# A user's module that has our folder's name; printed: where each of the three came from.
USER_MODULE = "OWNER = 'user'\n"
WHERE = """
import json, transforms, augtree_fx, augtree_fx.transforms
assert transforms.OWNER == "user"
print(json.dumps([m.__file__ for m in (transforms, augtree_fx, augtree_fx.transforms)]))
"""


def shipped_folders() -> dict[str, Path]:
    """Returns package name -> folder, for every folder of the checkout with Python files that are to be installed."""
    packages = {}
    for top in ROOT.iterdir():
        if not top.is_dir() or top.name.startswith(".") or top.name in NOT_SHIPPED or (top / "pyvenv.cfg").exists():
            continue
        for folder in {file.parent for file in top.rglob("*.py")} - {SCRIPTS}:
            parts = folder.relative_to(ROOT).parts
            packages[".".join(parts if parts[0] == "augtree_fx" else ("augtree_fx", *parts))] = folder
    return packages


def build_flags() -> list[str]:
    """Builds without isolation, hence without network, where the environment has a setuptools that can build us."""
    try:
        major = int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return []
    return ["--no-build-isolation"] if major >= 77 else []


def run_ok(command: list[object], cwd: Path, path: Path | None = None) -> str:
    """Runs a command without the checkout in PYTHONPATH (`path` in its place); returns the last line of its stdout."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    others = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    kept = [each for each in others if ROOT not in (Path(each).resolve(), *Path(each).resolve().parents)]
    env["PYTHONPATH"] = os.pathsep.join([*([] if path is None else [str(path)]), *kept])
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return (done.stdout.strip().splitlines() or [""])[-1]


def pip(*arguments: object, cwd: Path, python: object = sys.executable) -> None:
    run_ok([sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", *arguments], cwd=cwd)


def assert_origins(printed: str, user: Path, package: Path, transforms: Path) -> None:
    expected = [user / "transforms.py", package / "__init__.py", transforms / "__init__.py"]
    assert [Path(file).resolve() for file in json.loads(printed)] == [file.resolve() for file in expected]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads: no build output lands in the checkout, none of its leftovers is shipped."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    for folder in SETUPTOOLS["package-dir"].values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A user's working directory, with their own `transforms.py` in it."""
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "transforms.py").write_text(USER_MODULE)
    return folder


def test_package_list_equals_the_folders() -> None:
    folders = shipped_folders()
    assert sorted(SETUPTOOLS["packages"]) == sorted(folders), "list every folder with Python files in pyproject.toml"
    assert [str(folder) for folder in folders.values() if not (folder / "__init__.py").exists()] == []
    tops = {
        name: folder.relative_to(ROOT).as_posix()
        for name, folder in folders.items()
        if folder.parent in (ROOT, SCRIPTS)
    }
    assert SETUPTOOLS["package-dir"] == tops


def test_wheel_beside_a_users_transforms(source: Path, user: Path, tmp_path: Path) -> None:
    wheels, installed = tmp_path / "wheels", tmp_path / "installed"
    pip("wheel", "--no-deps", *build_flags(), "--wheel-dir", wheels, source, cwd=tmp_path)
    (wheel,) = wheels.iterdir()
    pip("install", "--no-deps", "--target", installed, wheel, cwd=tmp_path)
    assert {entry.name for entry in installed.iterdir() if "." not in entry.name} == {"augtree_fx"}
    package = installed / "augtree_fx"
    modules = {
        "/".join(name.split(".")[1:] + [file.name])
        for name, folder in shipped_folders().items()
        for file in folder.glob("*.py")
    }
    assert {file.relative_to(package).as_posix() for file in package.rglob("*.py")} == modules
    assert_origins(run_ok([sys.executable, "-c", WHERE], user, path=installed), user, package, package / "transforms")


def test_editable_install_beside_a_users_transforms(source: Path, user: Path, tmp_path: Path) -> None:
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    # Torch and the rest come from this environment. A path in a .pth file does not run the .pth files over there, so
    # our own editable install, if there is one, stays out of sight.
    purelib = Path(run_ok([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path))
    paths = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (purelib / "outer.pth").write_text("".join(f"{path}\n" for path in paths))
    pip("install", "--no-deps", "--ignore-installed", *build_flags(), "-e", source, cwd=tmp_path, python=python)
    assert_origins(run_ok([python, "-c", WHERE], user), user, source / "augtree_fx", source / "transforms")


def test_bare_checkout_beside_a_users_transforms(source: Path, user: Path) -> None:
    printed = run_ok([sys.executable, "-c", WHERE], user, path=source)
    assert_origins(printed, user, source / "augtree_fx", source / "transforms")


def test_copied_package_never_takes_a_users_transforms(source: Path, tmp_path: Path) -> None:
    """`augtree_fx/` copied alone into a project with its own `transforms` package: ours is missing, theirs is left."""
    shutil.copytree(source / "augtree_fx", tmp_path / "augtree_fx")
    (tmp_path / "transforms").mkdir()
    (tmp_path / "transforms" / "__init__.py").write_text("raise SystemExit('took the user module')\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "somebody-else"\n')
    code = """
try:
    import augtree_fx.transforms
except ModuleNotFoundError as error:
    assert error.name.startswith(("augtree_fx.transforms", "augtree_fx.dtensor_ops")), error
"""
    run_ok([sys.executable, "-c", code], tmp_path)


def test_imports_without_triton_and_flash_attention(source: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules.update(triton=None, flash_attn=None); import augtree_fx, augtree_fx.transforms"
    run_ok([sys.executable, "-c", code], tmp_path, path=source)
