"""What PyInstaller puts into a bundle with c10d_custom: all its modules, many of which are imported only when they are
wanted; the native core, which is loaded by its path; and the entry points by which torch finds the backend."""

from PyInstaller.utils.hooks import collect_dynamic_libs, collect_submodules, copy_metadata

hiddenimports = collect_submodules("c10d_custom")
binaries = collect_dynamic_libs("c10d_custom")
datas = copy_metadata("c10d-custom")
