"""C++ sources compiled for this processor by the compiler that Inductor finds, and their folders.

The symbols of Inductor are private ones, each used in one function. A symbol that another version
of torch lacks is an error of this file alone: nets are then not compiled, and trainings have no
kernels. The folders are of the cache; no other user can write there, as their code will be run.
"""

import grp
import os
import pwd
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from heedful.errors import UserError
from heedful.files import cache_home, user_errors

HEADERS = Path(__file__).parent  # of vectors and products
_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"  # the variable of torch
NO_COMPILER = "there is no C++ compiler: install one, for example by `apt install g++`"


def has_cpp_compiler() -> bool:
    """Inductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def build_library(sources: Sequence[Path], path: Path) -> None:
    """Compile C++ sources for this processor to a shared library with the file's name as soname."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    use_own_inductor_cache()
    flags = [f"-Wl,-soname,{path.name}", "-ffp-contract=fast", f"-I{HEADERS}"]
    options = CppTorchOptions(vec_isa=pick_vec_isa(), extra_flags=flags)
    builder = CppBuilder(path.stem, [*map(str, sources)], options, str(path.parent))
    builder.build()
    target = Path(builder.get_target_file_path())
    if target != path:
        shutil.move(target, path)


def code_folder(name: str) -> Path:
    """A folder of `cache_home` that only this user (and root) can write, made if it is missing.

    Raises:
        UserError: it cannot be made, is a link, or another user could write there.
    """
    folder = cache_home().absolute() / name
    with user_errors("make", folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink():
            raise UserError(
                f"{folder} is a link to another place, so that code in it is not safe: remove the "
                "link, or set HEEDFUL_CACHE to a folder of your own"
            )
        links = [path for path in folder.parents if path.is_symlink()]
        folder = folder.resolve()
        places = (*links, folder, *folder.parents)
        writable = next((path for path in places if _is_open(path, folder)), None)
    if writable is not None:
        raise UserError(
            f"other users can write in {writable}, so that code in {folder} is not safe: set "
            "HEEDFUL_CACHE to a folder of your own"
        )
    return folder


def use_own_inductor_cache() -> None:
    """Let Inductor keep what it compiles in the cache, unless the user named a folder.

    Its default is a folder of a known name in /tmp, which another user can make first; Inductor
    runs and unpickles what it finds there. Raises UserError as `code_folder`.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Torch sets the variable to its default when parts of it are imported.
    if os.environ.get(_INDUCTOR, "") in ("", os.path.abspath(default_cache_dir())):
        os.environ[_INDUCTOR] = str(code_folder("inductor"))


def _is_open(path: Path, folder: Path) -> bool:
    """True if another user can replace files of a folder, one of its parents, or a link to them.

    In a parent with the sticky bit, such as /tmp, only the owner of an entry can.
    """
    status = path.lstat()
    # In a container root can have another number, which then owns the root of the file system.
    if status.st_uid not in (os.geteuid(), 0, Path("/").stat().st_uid):
        return True
    if stat.S_ISLNK(status.st_mode):  # only its owner can change it; all may have its mode
        return False
    if status.st_mode & stat.S_ISVTX and path != folder:
        return False
    by_group = status.st_mode & stat.S_IWGRP and _has_others(status.st_gid)
    return bool(status.st_mode & stat.S_IWOTH or by_group)


def _has_others(group: int) -> bool:
    """A group has members beside this user and root; many systems have one for each user.

    The list of a group leaves out the users whose primary group it is. Of group 0 these are root
    and accounts of the system, which root alone can make.
    """
    try:
        user = pwd.getpwuid(os.geteuid())
        members = set(grp.getgrgid(group).gr_mem) - {user.pw_name, "root"}
    except KeyError:  # a user without a name, as in some containers
        return group != 0
    if members or group == 0:
        return bool(members)
    others = (entry for entry in pwd.getpwall() if entry.pw_uid not in (0, user.pw_uid))
    return group != user.pw_gid or any(entry.pw_gid == group for entry in others)
