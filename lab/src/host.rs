//! Programs that run on the host, each with a log, and as root where needed.

use std::{
    fs::{self, File},
    io::{Read, Write},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{
    error::{Context, Error, Result},
    paths,
    progress::{self, Count},
};

/// The number of a log's last lines that an error shows.
const TAIL_LINES: usize = 25;

/// Runs a program to its end. The program's output goes to a log of the name `log`.
///
/// # Errors
/// If the program cannot be started or does not succeed; the error shows the last lines of the log.
pub fn run(what: &str, log: &str, command: &mut Command) -> Result<()> {
    run_shown(what, log, command, None)
}

/// Runs a program as [`run`] does, and shows its progress. The program prints about `lines` lines
/// in all.
///
/// # Errors
/// As for [`run`].
pub fn run_counted(what: &str, log: &str, command: &mut Command, lines: u64) -> Result<()> {
    run_shown(what, log, command, Some(lines))
}

fn run_shown(what: &str, log: &str, command: &mut Command, lines: Option<u64>) -> Result<()> {
    let path = paths::lab_dir("log")?.join(format!("{log}.log"));
    let mut file = File::create(&path).context(|| format!("write {}", path.display()))?;
    let _ = writeln!(file, "{command:?}");
    let copy = file.try_clone().context(|| "share a log".into())?;
    let program = command.get_program().to_string_lossy().into_owned();
    let work = || command.stdin(Stdio::null()).stdout(file).stderr(copy).status();
    let status = match lines {
        None => progress::step(what, work),
        Some(expected) => {
            progress::counted(what, Count { expected, done: Box::new(line_counter(path.clone())) }, work)
        }
    };
    let status = status.context(|| format!("start {program}"))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Program {
        what: what.to_owned(),
        program,
        status: status.to_string(),
        tail: tail(&path, TAIL_LINES),
        log: path,
    })
}

/// Returns a function that counts the lines of a growing file. Each call reads only the new part.
fn line_counter(path: PathBuf) -> impl FnMut() -> u64 + Send {
    let mut file = File::open(path).ok();
    let (mut lines, mut buffer) = (0, vec![0; 64 << 10]);
    move || {
        while let Some(count @ 1..) = file.as_mut().and_then(|file| file.read(&mut buffer).ok()) {
            lines += buffer[..count].iter().filter(|&&byte| byte == b'\n').count() as u64;
        }
        lines
    }
}

/// Copies a file by a program, with holes in place of zeros.
///
/// This process must never have the copy open for writing. A child that another thread starts would
/// inherit the open file for a moment, and the kernel refuses to execute a file that is open for
/// writing (`ETXTBSY`).
///
/// # Errors
/// If a file cannot be read or written.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    let name = to.file_name().unwrap_or_default().to_string_lossy();
    let mut command = Command::new("cp");
    run(
        &format!("a copy of {}", from.display()),
        &format!("copy-{name}"),
        command.arg("--sparse=always").arg(from).arg(to),
    )
}

/// Returns a command that runs as root, through sudo if this process is not root.
#[must_use]
pub fn as_root(program: &str) -> Command {
    if rustix::process::geteuid().is_root() {
        return Command::new(program);
    }
    let mut sudo = Command::new("sudo");
    sudo.arg(program);
    sudo
}

/// Returns a command that runs as root, with mounts of its own. These mounts go with the command's
/// last process, however it ends. The host never has them.
#[must_use]
pub fn as_root_with_own_mounts(program: &str) -> Command {
    let mut command = as_root("unshare");
    command.args(["--mount", "--propagation", "private", "--", program]);
    command
}

/// Removes a tree that may belong to root.
///
/// # Errors
/// If a part of the tree stays.
pub fn remove_tree(tree: &Path) -> Result<()> {
    if !tree.exists() {
        return Ok(());
    }
    let what = format!("remove {}", tree.display());
    run(&what, "remove", as_root("rm").args(["-rf", "--one-file-system"]).arg(tree))
}

/// Returns the last lines of a text file, as far as the file can be read.
#[must_use]
pub fn tail(path: &Path, lines: usize) -> String {
    let text = fs::read(path).unwrap_or_default();
    last_lines(&String::from_utf8_lossy(&text), lines)
}

/// Returns the last lines of a text.
#[must_use]
pub fn last_lines(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// Returns a free port of this host.
///
/// # Errors
/// If no port is free.
pub fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context(|| "find a free port".into())?;
    Ok(listener.local_addr().context(|| "find a free port".into())?.port())
}

/// Returns the file that a program's name means in this process's search path.
#[must_use]
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| file.is_file())
}

/// Returns words quoted for a shell.
#[must_use]
pub fn quoted(words: &[String]) -> String {
    let words: Vec<String> = words.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect();
    words.join(" ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use super::*;

    #[test]
    fn lines_are_counted_as_a_file_grows() {
        let path = std::env::temp_dir().join(format!("mercury-lab-lines-{}", std::process::id()));
        let mut file = File::create(&path).unwrap();
        let mut count = line_counter(path.clone());
        assert_eq!(count(), 0);
        file.write_all(b"one\ntwo\nthr").unwrap();
        assert_eq!(count(), 2);
        file.write_all(b"ee\n").unwrap();
        assert_eq!((count(), count()), (3, 3));
        fs::remove_file(&path).unwrap();
    }

    /// With [`fs::copy`] this test fails within some hundred rounds.
    #[test]
    fn a_copied_program_starts_while_other_threads_start_programs() {
        const ROUNDS: usize = 400;
        let directory = std::env::temp_dir().join(format!("mercury-lab-copy-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let (program, is_done) = (directory.join("true"), AtomicBool::new(false));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_done.load(Ordering::Relaxed) {
                        Command::new("/bin/true").status().unwrap();
                    }
                });
            }
            let started = (0..ROUNDS).try_for_each(|_| {
                copy(Path::new("/bin/true"), &program).map_err(|error| error.to_string())?;
                Command::new(&program).status().map_err(|error| error.to_string())?;
                fs::remove_file(&program).map_err(|error| error.to_string())
            });
            is_done.store(true, Ordering::Relaxed);
            assert_eq!(started, Ok(()));
        });
        fs::remove_dir_all(&directory).unwrap();
    }
}
