"""Stands in for the repositories that Bazel 4 would download, so that native Python rules work without a network.

Bazel's own toolchains load the C++ and Java rules from repositories, though they are native rules still, and each test
depends on coverage tools, though they run only under `bazel coverage`.
"""

_RULES = {
    "cc": ["cc_binary", "cc_import", "cc_library", "cc_test", "cc_toolchain", "cc_toolchain_suite"],
    "java": ["java_binary", "java_import", "java_library", "java_runtime", "java_test", "java_toolchain"],
}
_COVERAGE_TOOLS = ["coverage_report_generator", "lcov_merger"]

def _write_files(ctx):
    for path, content in ctx.attr.files.items():
        ctx.file(path, content)

_written = repository_rule(implementation = _write_files, attrs = {"files": attr.string_dict()})

def offline_repositories():
    for language, names in _RULES.items():
        _written(name = "rules_" + language, files = {
            language + "/BUILD": "",
            language + "/defs.bzl": "\n".join(["{0} = native.{0}".format(name) for name in names]),
        })
    group = "filegroup(name = '%s', visibility = ['//visibility:public'])"
    _written(name = "remote_coverage_tools", files = {
        "BUILD": "\n".join([group % name for name in _COVERAGE_TOOLS]),
    })
