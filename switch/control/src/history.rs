//! Outcomes of this machine's checkpoints and moves, for `mercury metrics`.
//!
//! Each action has a record and a lock in /run/mercury. The lock is held while the action is carried out, so
//! a process that was killed does not count as running. Records are kept in memory alone: on another file
//! system than tmpfs nothing is written, since file systems may be frozen or out of reach when an action
//! ends. A restored or moved machine has them as part of its memory; a restart loses them.

use crate::error::Error;
use rustix::fs::{FlockOperation, flock, statfs};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Instant, SystemTime},
};

/// Folder of the records.
pub const FOLDER: &str = "/run/mercury";

/// `f_type` of tmpfs.
const TMPFS: i64 = 0x0102_1994;
/// `f_type` of ramfs, the file system of an initial RAM disk.
const RAMFS: i64 = 0x8584_58f6;

/// An action whose outcome is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// `mercury checkpoint`, each image of a series by itself.
    Checkpoint,
    /// `mercury migrate` and `mercury maintenance`.
    Migrate,
}

impl Action {
    pub const ALL: [Self; 2] = [Self::Checkpoint, Self::Migrate];

    /// Returns the name in files and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Checkpoint => "checkpoint",
            Self::Migrate => "migrate",
        }
    }
}

/// The outcome of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The image is complete; the machine runs on.
    Done,
    /// This is the machine that was restored from the image, or that arrived.
    Continued,
    /// The attempt was refused or failed.
    Failed,
}

impl Outcome {
    pub const ALL: [Self; 3] = [Self::Done, Self::Continued, Self::Failed];

    /// Returns the name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Continued => "continued",
            Self::Failed => "failed",
        }
    }
}

/// Figures of an attempt that succeeded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Seconds for which applications stood still.
    pub pause_seconds: f64,
    pub bytes: u64,
}

/// The last attempt, and counts of all attempts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Attempts by outcome, in the order of [`Outcome::ALL`].
    pub counts: [u64; 3],
    /// The last outcome; none before the first attempt has ended.
    pub last: Option<Outcome>,
    /// Exit status of the last attempt.
    pub exit: u8,
    /// Code of the last refusal.
    pub code: Option<String>,
    /// Time at which the last attempt ended, in seconds since 1970.
    pub ended: f64,
    /// Duration of the last attempt in seconds.
    pub seconds: f64,
    /// Time at which the last success ended, in seconds since 1970.
    pub succeeded: Option<f64>,
    /// Figures of the last success that this machine knows of.
    pub figures: Option<Figures>,
}

/// An attempt that is under way.
#[derive(Debug)]
pub struct Attempt {
    folder: PathBuf,
    action: Action,
    begun: Instant,
    /// Lock, held until the end. `None` if nothing is recorded, or another process makes an
    /// attempt.
    lock: Option<File>,
}

impl Attempt {
    /// Begins an attempt. A failure to record it is no failure of the attempt.
    #[must_use]
    pub fn begin(action: Action) -> Self {
        Self::begin_in(Path::new(FOLDER), action)
    }

    fn begin_in(folder: &Path, action: Action) -> Self {
        let lock = lock(folder, action).ok();
        Self { folder: folder.to_owned(), action, begun: Instant::now(), lock }
    }

    /// Ends the attempt with figures of a success, or with its failure.
    pub fn end(self, outcome: Result<(Outcome, Option<Figures>), &Error>) {
        if self.lock.is_none() {
            return;
        }
        let mut record = read(&self.folder, self.action).unwrap_or_default();
        record.note(outcome, now(), self.begun.elapsed().as_secs_f64());
        // If this fails, readers of metrics see the older record.
        let _ = write(&self.folder, self.action, &record);
    }
}

impl Record {
    fn note(&mut self, outcome: Result<(Outcome, Option<Figures>), &Error>, now: f64, seconds: f64) {
        let kind = outcome.map_or(Outcome::Failed, |(kind, _)| kind);
        self.counts[kind as usize] += 1;
        (self.last, self.ended, self.seconds) = (Some(kind), now, seconds);
        match outcome {
            Ok((_, figures)) => {
                (self.exit, self.code, self.succeeded) = (0, None, Some(now));
                self.figures = figures.or(self.figures);
            }
            Err(error) => {
                self.exit = error.exit as u8;
                self.code = error.code.map(|code| code.name().to_owned());
            }
        }
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

fn lock_path(folder: &Path, action: Action) -> PathBuf {
    folder.join(format!("{}.lock", action.name()))
}

fn record_path(folder: &Path, action: Action) -> PathBuf {
    folder.join(format!("{}.last", action.name()))
}

fn lock(folder: &Path, action: Action) -> io::Result<File> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    if !matches!(statfs(folder)?.f_type, TMPFS | RAMFS) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let path = lock_path(folder, action);
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}

fn write(folder: &Path, action: Action, record: &Record) -> io::Result<()> {
    let path = record_path(folder, action);
    let fresh = path.with_extension("new");
    fs::write(&fresh, serde_json::to_vec(record)?)?;
    fs::rename(fresh, path)
}

/// Reads the record of an action; none if there was no attempt since the start.
#[must_use]
pub fn read(folder: &Path, action: Action) -> Option<Record> {
    serde_json::from_slice(&fs::read(record_path(folder, action)).ok()?).ok()
}

/// Returns true while a process carries the action out.
#[must_use]
pub fn is_running(folder: &Path, action: Action) -> bool {
    let Ok(file) = File::open(lock_path(folder, action)) else { return false };
    flock(&file, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Exit;
    use mercury_abi::code::Code;

    /// Makes a folder on tmpfs.
    fn folder() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs")
    }

    const FIGURES: Figures = Figures { pause_seconds: 0.25, bytes: 4096 };

    #[test]
    fn attempts_are_counted_and_the_last_success_outlasts_failures() {
        let folder = folder();
        let begin = || Attempt::begin_in(folder.path(), Action::Checkpoint);
        assert_eq!(read(folder.path(), Action::Checkpoint), None);
        begin().end(Ok((Outcome::Done, Some(FIGURES))));
        let success = read(folder.path(), Action::Checkpoint).expect("a record");
        assert_eq!((success.last, success.exit), (Some(Outcome::Done), 0));
        let error = Error::refused("checkpoint", Code::Busy, None, [0; 2]);
        begin().end(Err(&error));
        let failure = read(folder.path(), Action::Checkpoint).expect("a record");
        assert_eq!(failure.counts, [1, 0, 1]);
        assert_eq!((failure.last, failure.exit), (Some(Outcome::Failed), Exit::Busy as u8));
        assert_eq!(failure.code.as_deref(), Some("busy"));
        assert_eq!((failure.succeeded, failure.figures), (success.succeeded, Some(FIGURES)));
        assert_eq!(read(folder.path(), Action::Migrate), None);
    }

    #[test]
    fn an_attempt_runs_until_it_ends_or_its_process_does() {
        let folder = folder();
        assert!(!is_running(folder.path(), Action::Migrate));
        let attempt = Attempt::begin_in(folder.path(), Action::Migrate);
        assert!(is_running(folder.path(), Action::Migrate));
        // Another attempt at the same time is refused, and not recorded.
        Attempt::begin_in(folder.path(), Action::Migrate)
            .end(Err(&Error::new(Exit::Busy, "another process moves this machine")));
        assert_eq!(read(folder.path(), Action::Migrate), None);
        drop(attempt);
        assert!(!is_running(folder.path(), Action::Migrate));
    }

    #[test]
    fn nothing_is_written_to_a_disk() {
        // A file system of the kernel's own, which is not in memory.
        let attempt = Attempt::begin_in(Path::new("/proc/self"), Action::Checkpoint);
        assert!(attempt.lock.is_none());
    }
}
