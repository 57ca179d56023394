//! The stand-in for the assembler. gcc calls it as the assembler; it rewrites the text and hands it
//! on to the real one.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs,
    io::{self, Read, Write},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus},
};

use crate::{
    error::{Error, Result},
    place,
    prelude::prelude,
    rewrite::{self, Treatment},
};

/// Environment variable that names the real assembler, if it is not the `as` of the search path.
pub const REAL: &str = "AFTERBURNER_AS";
/// Name of the assembler that gcc looks for.
pub const NAME: &str = "as";

/// Options that take the next argument as their value.
const WITH_VALUE: &[&str] = &["-o", "-I", "--defsym", "-D", "--MD", "-J", "-Wa"];

/// The relevant part of an assembler's command line.
#[derive(Debug, PartialEq, Eq)]
struct Job {
    /// Index of the only input among the arguments; `None` for standard input without a name.
    input: Option<usize>,
    treatment: Treatment,
}

/// Assembles a file: rewrites its text and calls the real assembler.
///
/// # Errors
/// The real assembler cannot be found, or the input cannot be read.
pub fn run(arguments: &[OsString]) -> Result<ExitCode> {
    let real = real()?;
    let Some(job) = Job::of(arguments) else { return start(&real, arguments) };
    let text = job.read(arguments)?;
    let insertions = rewrite::rewrite(&text, job.treatment);
    let directory = tempfile::tempdir().map_err(|error| {
        Error::new(format!("cannot make a directory: {error}"))
            .hint("make room in /tmp, or name another directory in TMPDIR")
    })?;
    let write = |name: &str, text: &[u8]| {
        let path = directory.path().join(name);
        fs::write(&path, text).map_err(|error| Error::file("write", &path, error)).map(|()| path)
    };
    let before = write("prelude.s", prelude(job.treatment).as_bytes())?;
    let rewritten = write("input.s", &rewrite::apply(&text, &insertions))?;
    let mut words: Vec<OsString> = arguments.to_vec();
    let place = job.input.unwrap_or(words.len());
    words.splice(place..(place + 1).min(words.len()), [before.into_os_string(), rewritten.into_os_string()]);
    start(&real, &words)
}

impl Job {
    /// Returns the job of a command line; `None` if the afterburner has nothing to do in it.
    fn of(arguments: &[OsString]) -> Option<Self> {
        let words: Vec<&str> = arguments.iter().map(|word| word.to_str().unwrap_or("")).collect();
        let mut inputs = Vec::new();
        let mut output = None;
        let mut at = 0;
        while at < words.len() {
            match words[at] {
                "-o" => output = words.get(at + 1).copied(),
                // Questions to the assembler itself, or 32-bit code.
                "--version" | "-version" | "--help" | "--target-help" | "--32" | "--x32" => return None,
                word if !word.starts_with('-') || word == "-" => inputs.push(at),
                _ => {}
            }
            at += if WITH_VALUE.contains(&words[at]) { 2 } else { 1 };
        }
        let treatment = place::treatment(output?)?;
        match inputs[..] {
            [] => Some(Self { input: None, treatment }),
            [input] => Some(Self { input: Some(input), treatment }),
            _ => None,
        }
    }

    fn read(&self, arguments: &[OsString]) -> Result<Vec<u8>> {
        let path = self.input.map(|at| Path::new(&arguments[at])).filter(|path| *path != Path::new("-"));
        let Some(path) = path else {
            let mut text = Vec::new();
            let read = io::stdin().read_to_end(&mut text);
            return read.map(|_| text).map_err(|error| {
                Error::new(format!("cannot read standard input: {error}"))
                    .hint("see what the compiler before it says, and build again")
            });
        };
        fs::read(path).map_err(|error| Error::file("read", path, error))
    }
}

/// Returns the real assembler: the first `as` of the search path that is not this program.
fn real() -> Result<PathBuf> {
    if let Some(path) = env::var_os(REAL) {
        return Ok(path.into());
    }
    let own = env::current_exe().and_then(fs::canonicalize).ok();
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path)
        .map(|directory| directory.join(NAME))
        .find(|file| file.is_file() && fs::canonicalize(file).ok() != own);
    found.ok_or_else(|| {
        Error::new(format!("there is no `{NAME}` in the search path"))
            .hint(format!("install binutils, or name the assembler in {REAL}"))
    })
}

fn start(real: &Path, arguments: &[OsString]) -> Result<ExitCode> {
    let status = Command::new(real).args(arguments).status().map_err(|error| Error::start(real, &error))?;
    Ok(code(status))
}

/// Returns another program's status as this program's own.
#[must_use]
pub fn code(status: ExitStatus) -> ExitCode {
    let number = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    ExitCode::from(u8::try_from(number).unwrap_or(1))
}

/// Returns true if this program was called by the assembler's name.
#[must_use]
pub fn is_called(program: Option<&OsStr>) -> bool {
    program.is_some_and(|program| Path::new(program).file_name() == Some(OsStr::new(NAME)))
}

/// Prints an error in the form that compilers' drivers expect.
pub fn complain(error: &Error) -> ExitCode {
    let _ = writeln!(io::stderr(), "afterburner: error: {error}");
    ExitCode::FAILURE
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn job(line: &str) -> Option<Job> {
        let words: Vec<OsString> = line.split(' ').map(Into::into).collect();
        Job::of(&words)
    }

    #[test]
    fn jobs_are_read_from_what_gcc_says() {
        let slots = |input| Some(Job { input, treatment: Treatment::Slots });
        assert_eq!(job("-I ./include --64 -o init/main.o /tmp/cc1.s"), slots(Some(5)));
        assert_eq!(job("--64 --gdwarf-5 -o kernel/a.o -"), slots(Some(4)));
        assert_eq!(job("--64 -o kernel/a.o"), slots(None));
        for line in [
            "--version",
            "--32 -o kernel/a.o /tmp/cc1.s",
            "--64 /tmp/cc1.s",
            "--64 -o arch/x86/boot/a.o /tmp/cc1.s",
            "--64 -o kernel/a.o a.s b.s",
        ] {
            assert_eq!(job(line), None, "{line}");
        }
    }

    #[test]
    fn only_the_assemblers_name_is_the_assemblers() {
        assert!(is_called(Some(OsStr::new("/x/as"))));
        assert!(!is_called(Some(OsStr::new("/as/afterburner"))) && !is_called(None));
    }
}
