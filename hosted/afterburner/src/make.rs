//! The subcommand `afterburner make`: a kernel's own build with the stand-in in place of the
//! assembler. Everything that the build links is accounted for.

use std::{
    env,
    ffi::OsString,
    fs,
    hash::{DefaultHasher, Hasher},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::SystemTime,
};

use crate::{
    assembler,
    error::{Error, Result},
    verify::report,
};

/// Directory in the build's output. Kernels' makefiles and git ignore names of this form.
const DIRECTORY: &str = ".afterburner";
/// File beside the link. Its time is that of the last account without a finding.
const STAMP: &str = "accounted";
/// File that a build links, besides modules.
const KERNEL: &str = "vmlinux";

/// Runs `make` with `CC` set so that gcc takes this program for the assembler.
///
/// A compiler that the caller has chosen with `CC=` is kept. The kernel's build makes everything
/// anew when `CC` changes, so `CC` names this program by its contents. Nothing is then made twice,
/// and nothing stays that another afterburner has made.
///
/// If make succeeds, the kernel and the modules are accounted for that are newer than the last
/// account without a finding. The status is then that of [`report::complain`].
///
/// # Errors
/// The link for the assembler cannot be made, make cannot be started, or its output cannot be
/// accounted for.
pub fn run(arguments: &[OsString]) -> Result<ExitCode> {
    let own = own_path()?;
    let contents = fs::read(&own).map_err(|error| Error::file("read", &own, error))?;
    let here = env::current_dir().map_err(|error| {
        Error::new(format!("cannot tell the directory: {error}"))
            .hint("start it in the kernel's source, in a directory that is still there")
    })?;
    let output = output(&here, arguments, |name| env::var_os(name));
    let directory = output.join(DIRECTORY).join(name(&contents));
    stand_in(&own, &directory)?;
    let (words, compiler) = without_compiler(arguments);
    let mut make = Command::new("make");
    make.args(words).arg(compiler_word(&compiler, &directory));
    let status = make.status().map_err(|error| Error::start(Path::new("make"), &error))?;
    if !status.success() {
        return Ok(assembler::code(status));
    }
    let now = SystemTime::now();
    let stamp = directory.join(STAMP);
    let last = fs::metadata(&stamp).and_then(|data| data.modified()).ok();
    let code = report::complain(&linked(&output, last)?)?;
    if code == ExitCode::SUCCESS {
        let file = fs::File::create(&stamp).and_then(|file| file.set_modified(now));
        file.map_err(|error| Error::file("write", &stamp, error))?;
    }
    Ok(code)
}

/// Returns the kernel in a build's directory and the modules beneath it, except files written
/// before `since`.
fn linked(directory: &Path, since: Option<SystemTime>) -> Result<Vec<PathBuf>> {
    let mut found = modules(directory)?;
    found.push(directory.join(KERNEL));
    let is_new = |path: &PathBuf| {
        let written = fs::metadata(path).and_then(|data| data.modified());
        written.is_ok_and(|written| since.is_none_or(|since| written >= since))
    };
    found.retain(is_new);
    found.sort();
    Ok(found)
}

/// Returns true if the file is a module that was linked there. Copies to be installed may have been
/// stripped.
fn is_module(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "ko") && path.with_extension("mod.o").exists()
}

fn modules(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(directory).map_err(|error| Error::file("list", directory, error))?;
    for entry in entries.flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && entry.file_name() != DIRECTORY => found.extend(modules(&path)?),
            Ok(kind) if kind.is_file() && is_module(&path) => found.push(path),
            _ => {}
        }
    }
    Ok(found)
}

/// Returns the path of this program. Without /proc, as in a bare root, the program's name must be a
/// path.
fn own_path() -> Result<PathBuf> {
    let named = || env::args_os().next().map(PathBuf::from).filter(|name| name.components().count() > 1);
    let found = env::current_exe().ok().or_else(|| fs::canonicalize(named()?).ok());
    found.ok_or_else(|| Error::new("cannot find this program").hint("call it by its path, or mount /proc"))
}

/// Makes the directory in which gcc finds its assembler.
fn stand_in(own: &Path, directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).map_err(|error| Error::file("make", directory, error))?;
    let link = directory.join(assembler::NAME);
    // The link may exist, and point to the place where this program was before.
    let _ = fs::remove_file(&link);
    symlink(own, &link).map_err(|error| Error::file("make", &link, error))
}

fn name(contents: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    hasher.write(contents);
    format!("{:016x}", hasher.finish())
}

/// Returns the build's output directory: a module's (`M=`, `KBUILD_EXTMOD`), a separate one (`O=`,
/// `KBUILD_OUTPUT`), or the one to which make is sent (`-C`) or in which it is started.
/// `environment` returns variables that the arguments do not set.
fn output(here: &Path, arguments: &[OsString], environment: impl Fn(&str) -> Option<OsString>) -> PathBuf {
    let words: Vec<&str> = arguments.iter().filter_map(|word| word.to_str()).collect();
    let mut sent = here.to_owned();
    for (at, word) in words.iter().enumerate() {
        let next = || words.get(at + 1).copied();
        let to = match *word {
            "-C" | "--directory" => next(),
            word => word.strip_prefix("--directory=").or_else(|| word.strip_prefix("-C")),
        };
        // make follows each `-C` from the directory of the one before.
        sent.extend(to);
    }
    let word = |name: &str| {
        words.iter().rev().find_map(|word| word.strip_prefix(name)?.strip_prefix('=')).map(OsString::from)
    };
    let named = word("M")
        .or_else(|| word("KBUILD_EXTMOD").or_else(|| environment("KBUILD_EXTMOD")))
        .or_else(|| word("O"))
        .or_else(|| word("KBUILD_OUTPUT").or_else(|| environment("KBUILD_OUTPUT")));
    match named.filter(|to| !to.is_empty()) {
        Some(to) => sent.join(to),
        None => sent,
    }
}

/// Returns the arguments without `CC=`, and its value.
fn without_compiler(arguments: &[OsString]) -> (Vec<OsString>, String) {
    let chosen = |word: &OsString| word.to_str().and_then(|word| word.strip_prefix("CC=")).map(str::to_owned);
    let compiler = arguments.iter().rev().find_map(chosen).unwrap_or_else(|| "gcc".to_owned());
    (arguments.iter().filter(|word| chosen(word).is_none()).cloned().collect(), compiler)
}

fn compiler_word(compiler: &str, directory: &Path) -> String {
    format!("CC={compiler} -B{}/", directory.display())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_callers_compiler_is_kept() {
        let words: Vec<OsString> = ["-j2", "CC=gcc-12", "O=x"].map(Into::into).into();
        let (rest, compiler) = without_compiler(&words);
        assert_eq!(rest, ["-j2", "O=x"].map(OsString::from));
        assert_eq!(compiler_word(&compiler, Path::new("/t")), "CC=gcc-12 -B/t/");
        assert_eq!(without_compiler(&[]).1, "gcc");
    }

    #[test]
    fn the_stand_in_lies_where_the_build_writes() {
        for (line, expected) in [
            ("-j2 vmlinux", "/h"),
            ("-C /k O=/o vmlinux", "/o"),
            ("-C k O=../o", "/h/k/../o"),
            ("-Ck O=o", "/h/k/o"),
            ("-C k -C l", "/h/k/l"),
            ("--directory=/k", "/k"),
            ("--directory k O=o", "/h/k/o"),
            ("KBUILD_OUTPUT=o -C k", "/h/k/o"),
            ("KBUILD_OUTPUT=o O=p", "/h/p"),
            ("-C /k M=/m modules", "/m"),
            ("-C /k KBUILD_EXTMOD=/m modules", "/m"),
        ] {
            let words: Vec<OsString> = line.split(' ').map(Into::into).collect();
            assert_eq!(output(Path::new("/h"), &words, |_| None), Path::new(expected), "{line}");
        }
        let set = |name: &str| (name == "KBUILD_OUTPUT").then(|| "/o".into());
        assert_eq!(output(Path::new("/h"), &[], set), Path::new("/o"));
        assert_eq!(output(Path::new("/h"), &["O=p".into()], set), Path::new("/h/p"));
        assert_eq!(output(Path::new("/h"), &["O=".into()], set), Path::new("/h"));
    }

    #[test]
    fn another_program_has_another_name() {
        assert_eq!(name(b"a"), name(b"a"));
        assert_ne!(name(b"a"), name(b"b"));
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("x/y");
        for program in ["/bin/true", "/bin/false"] {
            stand_in(Path::new(program), &place).unwrap();
            assert_eq!(fs::read_link(place.join("as")).unwrap(), Path::new(program));
        }
    }
}
