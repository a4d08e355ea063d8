"""Which hosts are what: package registries, documentation, forges, raw-file hosts. Data only."""

from __future__ import annotations

# every project's packages are there; a task's own distribution is looked at more closely
REGISTRIES = frozenset({
    "pypi.org", "files.pythonhosted.org", "pypi.python.org", "registry.npmjs.org", "registry.yarnpkg.com",
    "crates.io", "static.crates.io", "index.crates.io", "rubygems.org", "index.rubygems.org", "repo.maven.apache.org",
    "repo1.maven.org", "proxy.golang.org", "sum.golang.org", "conda.anaconda.org", "repo.anaconda.com",
    "deb.debian.org", "security.debian.org", "archive.ubuntu.com", "security.ubuntu.com", "dl-cdn.alpinelinux.org",
    "api.nuget.org", "packagist.org", "repo.packagist.org", "cran.r-project.org", "hackage.haskell.org",
})  # fmt: skip
DOCUMENTATION = (
    "docs.python.org", "*.readthedocs.io", "*.readthedocs.org", "developer.mozilla.org", "peps.python.org",
    "packaging.python.org", "docs.pytest.org", "numpy.org", "docs.scipy.org", "pandas.pydata.org", "docs.rs",
    "doc.rust-lang.org", "go.dev", "pkg.go.dev", "nodejs.org", "docs.npmjs.com", "en.cppreference.com",
    "devdocs.io", "man7.org", "www.rfc-editor.org", "datatracker.ietf.org", "www.w3.org", "docs.djangoproject.com",
    "www.sqlite.org", "www.postgresql.org", "git-scm.com", "www.gnu.org", "docs.docker.com",
)  # fmt: skip
# documentation that shows the source too
MIXED = frozenset({"docs.rs", "pkg.go.dev", "doc.rust-lang.org", "devdocs.io"})
# repositories, under owner/name
FORGES = (
    "github.com", "gitlab.com", "bitbucket.org", "codeberg.org", "gitee.com", "sr.ht", "sourceforge.net", "gitea.com",
    "githubusercontent.com", "github.io", "ghcr.io", "jsdelivr.net", "unpkg.com", "githack.com", "statically.io",
    "gitcdn.link", "sourcegraph.com", "grep.app", "softwareheritage.org", "archive.org", "libraries.io", "deps.dev",
    "swhid.org", "ghproxy.com", "gitclone.com", "kkgithub.com", "github.dev", "vscode.dev", "gist.github.com",
    "searchcode.com", "debian.net", "launchpad.net", "googlesource.com", "google.com", "bing.com", "duckduckgo.com",
)  # fmt: skip
