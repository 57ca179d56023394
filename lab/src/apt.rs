//! The host's sources of Debian packages, read from the host's own configuration of apt. The lab's
//! images so come from the same mirror as the host.
//!
//! Both formats of sources.list(5) are read: one line a source (`*.list`), and deb822
//! (`*.sources`). [`Packages`] takes tools out of packages that are not installed.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    error::{Context, Error, Result},
    host,
};

/// The keyring of Debian's own keys, as its package installs it.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// One source of binary packages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// The mirror's addresses. Several addresses are equivalent to several sources.
    pub uris: Vec<String>,
    /// The releases that this source serves.
    pub suites: Vec<String>,
    /// The archive's components: `main`, `contrib` …
    pub components: Vec<String>,
    /// The keyring that its release files must be signed by.
    pub signed_by: Option<PathBuf>,
}

impl Source {
    fn offers(&self, suite: &str) -> bool {
        let same = |found: &String| found.trim_end_matches('/') == suite;
        self.suites.iter().any(same) && self.components.iter().any(|name| name == "main")
    }

    /// Returns how strongly a source resembles Debian's own archive.
    ///
    /// Third parties sometimes name their suites like Debian's. Debian's archive is called `debian`
    /// and signed by Debian's keys on every mirror that follows the usual layout.
    fn looks_like_debian(&self) -> u32 {
        let path = |uri: &String| uri.trim_end_matches('/').rsplit('/').next() == Some("debian");
        let keys = |path: &PathBuf| path.to_string_lossy().contains("debian-archive");
        u32::from(self.uris.iter().any(path)) * 2 + u32::from(self.signed_by.as_ref().is_some_and(keys))
    }
}

/// Reads the one-line format.
#[must_use]
pub fn parse_list(text: &str) -> Vec<Source> {
    text.lines().filter_map(parse_list_line).collect()
}

fn parse_list_line(line: &str) -> Option<Source> {
    let line = line.split('#').next()?.trim();
    let rest = line.strip_prefix("deb")?;
    if !rest.starts_with([' ', '\t', '[']) {
        return None;
    }
    let rest = rest.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace().map(str::to_owned);
    let (uri, suite) = (words.next()?, words.next()?);
    let signed_by = options.split_whitespace().find_map(|option| option.strip_prefix("signed-by="));
    Some(Source {
        uris: vec![uri],
        suites: vec![suite],
        components: words.collect(),
        signed_by: signed_by.and_then(keyring_path),
    })
}

/// Reads the deb822 format: paragraphs of fields, where indented lines continue a field.
#[must_use]
pub fn parse_deb822(text: &str) -> Vec<Source> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines.split(|line| line.trim().is_empty()).filter_map(parse_paragraph).collect()
}

fn parse_paragraph(lines: &[&str]) -> Option<Source> {
    let field = |name: &str| -> Vec<String> { field_words(lines, name) };
    let is = |name: &str, value: &str| field(name).iter().any(|word| word == value);
    if !is("Types", "deb") || is("Enabled", "no") {
        return None;
    }
    Some(Source {
        uris: field("URIs"),
        suites: field("Suites"),
        components: field("Components"),
        signed_by: field("Signed-By").first().and_then(|word| keyring_path(word)),
    })
}

fn field_words(lines: &[&str], name: &str) -> Vec<String> {
    let mut inside = false;
    let mut words = Vec::new();
    for line in lines {
        let mut text = *line;
        if !line.starts_with([' ', '\t']) {
            let Some((key, value)) = line.split_once(':') else { continue };
            inside = key.eq_ignore_ascii_case(name);
            text = value;
        }
        if inside {
            words.extend(text.split_whitespace().map(str::to_owned));
        }
    }
    words
}

/// Returns the path of a keyring. A key that stands in the file itself, and a fingerprint, have no
/// path.
fn keyring_path(word: &str) -> Option<PathBuf> {
    let first = word.split(',').next()?;
    first.starts_with('/').then(|| PathBuf::from(first))
}

/// Returns the lines of a sources.list for `release`, from the mirrors that serve this host's own
/// release, `own`. The same archive holds all of Debian's releases.
#[must_use]
pub fn sources_for(release: &str, own: &str, sources: &[Source]) -> Vec<String> {
    let suites = [
        (own.to_owned(), release.to_owned()),
        (format!("{own}-updates"), format!("{release}-updates")),
        (format!("{own}-security"), format!("{release}-security")),
    ];
    suites
        .iter()
        .filter_map(|(mine, wanted)| {
            let best = sources.iter().filter(|source| source.offers(mine));
            let best = best.max_by_key(|source| source.looks_like_debian())?;
            let keyring = best.signed_by.clone().unwrap_or_else(|| PathBuf::from(KEYRING));
            let uri = best.uris.first()?;
            Some(format!("deb [signed-by={}] {uri} {wanted} main", keyring.display()))
        })
        .collect()
}

/// Returns the lines of a sources.list for `release` on this host.
///
/// # Errors
/// If this host is no Debian, or has no source for its own release.
pub fn host_sources_for(release: &str) -> Result<Vec<String>> {
    let own = host_release()?;
    let lines = sources_for(release, &own, &read_host_sources(Path::new("/etc/apt")));
    if lines.is_empty() {
        return Err(Error::Host(format!("apt's configuration on this host names no source for {own}")));
    }
    Ok(lines)
}

fn host_release() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context(|| "read /etc/os-release".into())?;
    let codename = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    codename
        .map(|name| name.trim_matches('"').to_owned())
        .ok_or_else(|| Error::Host("/etc/os-release does not say which Debian release this is".into()))
}

fn read_host_sources(etc: &Path) -> Vec<Source> {
    let mut files = vec![etc.join("sources.list")];
    let parts = fs::read_dir(etc.join("sources.list.d")).into_iter().flatten().flatten();
    files.extend(parts.map(|entry| entry.path()));
    files.sort();
    files.iter().flat_map(|path| read_source_file(path)).collect()
}

fn read_source_file(path: &Path) -> Vec<Source> {
    let text = fs::read_to_string(path).unwrap_or_default();
    match path.extension().and_then(|name| name.to_str()) {
        Some("list") => parse_list(&text),
        Some("sources") => parse_deb822(&text),
        _ => Vec::new(),
    }
}

/// Returns this host's settings for fetching packages (proxies, retries, checks of dates), as
/// options of `apt`.
#[must_use]
pub fn fetch_options() -> Vec<String> {
    let Ok(dump) = Command::new("apt-config").arg("dump").output() else { return Vec::new() };
    let wanted = ["Acquire::http", "Acquire::https", "Acquire::Check-", "Acquire::Retries"];
    String::from_utf8_lossy(&dump.stdout)
        .lines()
        .filter(|line| wanted.iter().any(|prefix| line.starts_with(prefix)))
        .filter(|line| !line.ends_with(" \"\";"))
        .map(|line| line.trim_end_matches(';').to_owned())
        .collect()
}

/// Packages from which the lab takes files, without installing them.
#[derive(Clone, Copy, Debug, Hash)]
pub struct Packages {
    pub release: &'static str,
    /// True if the release's backports are preferred.
    pub backports: bool,
    /// The packages' names, separated by commas.
    pub names: &'static str,
}

impl Packages {
    /// Unpacks the packages and their dependencies into `tree`, without documentation. None of
    /// their scripts is run. `what` is shown to people; `log` names the log.
    ///
    /// # Errors
    /// If the packages cannot be fetched; the error names the log.
    pub fn extract(&self, what: &str, log: &str, tree: &Path) -> Result<()> {
        let mut lines = host_sources_for(self.release)?;
        let mut options = fetch_options();
        if self.backports {
            let suite = format!("{}-backports", self.release);
            let main =
                lines.first().map(|line| line.replace(&format!(" {} ", self.release), &format!(" {suite} ")));
            lines.extend(main);
            options.push(format!("APT::Default-Release \"{suite}\""));
        }
        let sources = tree.with_extension("sources.list");
        fs::write(&sources, lines.join("\n") + "\n").context(|| "write the list of sources".into())?;
        let mut command = host::as_root_with_own_mounts("mmdebstrap");
        command.args(["--mode=root", "--variant=extract", "--dpkgopt=path-exclude=/usr/share/doc/*"]);
        command.arg(format!("--include={}", self.names));
        command.args(options.iter().map(|option| format!("--aptopt={option}")));
        command.arg(self.release).arg(tree).arg(&sources);
        host::run(what, log, &mut command)
    }
}

/// Fetches the upstream archive of a source package into `dir`, and makes `dir`. The lists and the
/// cache are separate from the host's. apt checks the archive against the release's signed list.
///
/// # Errors
/// If the archive cannot be fetched; the error names the log.
pub fn fetch_source(release: &str, package: &str, dir: &Path) -> Result<PathBuf> {
    for part in ["lists/partial", "archives/partial"] {
        fs::create_dir_all(dir.join(part)).context(|| format!("make {}", dir.display()))?;
    }
    let lines = host_sources_for(release)?.join("\n").replace("deb [", "deb-src [") + "\n";
    let sources = dir.join("sources.list");
    fs::write(&sources, lines).context(|| "write the list of sources".into())?;
    let apt = |words: &[&str]| {
        let mut command = Command::new("apt-get");
        command.current_dir(dir).arg("-q").arg("-oDir::Etc::SourceParts=-").arg("-oAPT::Sandbox::User=");
        let own = [("Etc::SourceList", &sources), ("State", &dir.to_owned()), ("Cache", &dir.to_owned())];
        command.args(own.map(|(name, path)| format!("-oDir::{name}={}", path.display())));
        command.args(
            fetch_options()
                .iter()
                .map(|option| format!("-o{}", option.replacen(' ', "=", 1).replace('"', ""))),
        );
        command.args(words);
        command
    };
    host::run("the list of Debian's source packages", "apt-update", &mut apt(&["update"]))?;
    let what = format!("the source of {package}");
    host::run(
        &what,
        &format!("source-{package}"),
        &mut apt(&["--download-only", "--tar-only", "source", package]),
    )?;
    let archives = fs::read_dir(dir).context(|| format!("list {}", dir.display()))?;
    let found = archives
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.to_string_lossy().contains(".orig.tar."));
    found.ok_or_else(|| Error::Host(format!("apt has fetched no archive of {package}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEB822: &str = "\
# a comment
Types: deb deb-src
URIs: http://mirror.invalid/debian
Suites: bookworm
 bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.invalid/debian-security
Suites: bookworm-security
Components: main contrib

Enabled: no
Types: deb
URIs: http://off.invalid/debian
Suites: bookworm
Components: main

Types: deb-src
URIs: http://source.invalid/debian
Suites: bookworm
Components: main
";

    #[test]
    fn deb822_paragraphs_and_continued_fields() {
        let sources = parse_deb822(DEB822);
        assert_eq!(sources.len(), 2);
        assert_eq!(sources[0].suites, ["bookworm", "bookworm-updates"]);
        assert_eq!(sources[0].signed_by.as_deref(), Some(Path::new(KEYRING)));
        assert_eq!(sources[1].components, ["main", "contrib"]);
    }

    #[test]
    fn one_line_sources_with_and_without_options() {
        let sources = parse_list(
            "# deb http://no.invalid/debian bookworm main\n\
             deb-src http://no.invalid/debian bookworm main\n\
             deb [arch=amd64 signed-by=/k.gpg] http://a.invalid/debian bookworm main contrib # mine\n\
             deb http://b.invalid/debian bookworm-updates main\n\
             deb\n",
        );
        assert_eq!(sources.len(), 2);
        assert_eq!(sources[0].uris, ["http://a.invalid/debian"]);
        assert_eq!(sources[0].components, ["main", "contrib"]);
        assert_eq!(sources[0].signed_by.as_deref(), Some(Path::new("/k.gpg")));
        assert_eq!(sources[1].suites, ["bookworm-updates"]);
        assert_eq!(sources[1].signed_by, None);
    }

    #[test]
    fn another_release_comes_from_the_same_mirror() {
        let lines = sources_for("trixie", "bookworm", &parse_deb822(DEB822));
        let keyring = format!("signed-by={KEYRING}");
        assert_eq!(
            lines,
            [
                format!("deb [{keyring}] http://mirror.invalid/debian trixie main"),
                format!("deb [{keyring}] http://mirror.invalid/debian trixie-updates main"),
                format!("deb [{keyring}] http://mirror.invalid/debian-security trixie-security main"),
            ]
        );
    }

    #[test]
    fn a_third_party_with_debians_suite_names_is_not_taken() {
        let mut sources = parse_list(
            "deb [signed-by=/other.gpg] http://third.invalid/packages bookworm main\n\
             deb http://mirror.invalid/debian/ bookworm main\n",
        );
        for _ in 0..2 {
            let lines = sources_for("bookworm", "bookworm", &sources);
            assert_eq!(
                lines,
                [format!("deb [signed-by={KEYRING}] http://mirror.invalid/debian/ bookworm main")]
            );
            sources.reverse();
        }
    }

    #[test]
    fn an_inline_key_is_no_path() {
        let text = "Types: deb\nURIs: u\nSuites: s\nComponents: main\nSigned-By:\n -----BEGIN PGP\n .\n";
        assert_eq!(parse_deb822(text)[0].signed_by, None);
    }
}
