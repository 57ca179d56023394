//! The undo process: a child that undoes the changes of a checkpoint to the machine if the
//! command's process is killed or makes no progress. The child is told of each step before it is
//! done. It acts when the connection breaks, or is silent for too long.
//!
//! This file has the steps, and the process as its parent sees it. [`super::guard`] is its own side.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    io::{self, Write},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Time for work during which nothing can be heard: another host makes an image durable.
const WORK_PATIENCE: Duration = Duration::from_secs(600);

/// The mover's facts about a move. They hold secrets, so no message shows them.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Step(serde_json::Value);

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Step").finish_non_exhaustive()
    }
}

impl Step {
    /// Packs facts for the undo process.
    ///
    /// # Errors
    ///
    /// Returns an error if the facts cannot be written as JSON.
    pub fn of(facts: &impl Serialize) -> io::Result<Self> {
        Ok(Self(serde_json::to_value(facts)?))
    }

    /// Unpacks the facts, or nothing if they are of another kind.
    #[must_use]
    pub fn facts<T: for<'a> Deserialize<'a>>(&self) -> Option<T> {
        serde_json::from_value(self.0.clone()).ok()
    }
}

/// An array of md, in its state before the hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Array {
    pub(super) name: String,
    /// Folder of the array in /sys.
    pub(super) folder: PathBuf,
    /// Action of its thread, such as "resync"; `None` if it was held already.
    pub(super) action: Option<String>,
    /// Interval at which md checked its bitmap.
    pub(super) time_base: Option<String>,
}

/// A number of the kernel's that is changed for an instant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Number {
    pub(super) file: PathBuf,
    /// The text before the change.
    pub(super) was: String,
}

/// A swap area that is on, as /proc/swaps shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Area {
    pub(super) path: PathBuf,
    /// Bytes that are swapped out to it.
    pub(super) used: u64,
    /// Priority; negative if the kernel has chosen it.
    pub(super) priority: i32,
}

/// A step to undo. The last step is undone first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Undo {
    /// A half-written file.
    Remove(PathBuf),
    /// The hypervisor beneath the machine.
    Detach,
    /// One CPU that is in the other mode for a moment.
    Switch {
        /// Number of the CPU.
        cpu: u32,
        /// True if it was attached.
        attach: bool,
    },
    /// A frozen file system, by its mount point.
    Thaw(PathBuf),
    /// An array whose thread is held.
    Release(Array),
    /// A swap area that is off.
    SwapOn(Area),
    /// A control group that is frozen.
    Unfreeze(PathBuf),
    /// The patience of the kernel's freezer: the instant is near.
    Patience(Number),
    /// Processes that were moved into a group of Mercury's; the group is removed.
    Return {
        /// Mercury's group.
        from: PathBuf,
        /// Their own group.
        to: PathBuf,
    },
    /// The fence that outlives its process, and the silence about this machine's addresses.
    Open,
    /// A move that was begun: the destination may have the whole machine, and wait.
    CallOff(Step),
    /// A move that was committed: nothing else may be undone before it is known that the machine
    /// does not run at the destination.
    Decide(Step),
}

impl Undo {
    /// Returns true if this step holds applications still.
    pub(super) fn holds(&self) -> bool {
        matches!(self, Self::Thaw(_) | Self::Unfreeze(_))
    }

    /// Returns true if programs may stand still from this step on, and feed no watchdog.
    pub(super) fn stops_programs(&self) -> bool {
        matches!(self, Self::Unfreeze(_) | Self::Patience(_))
    }

    /// Returns true if this step belongs to holding applications still.
    pub(super) fn belongs_to_hold(&self) -> bool {
        self.holds()
            || matches!(
                self,
                Self::Return { .. }
                    | Self::Release(_)
                    | Self::SwapOn(_)
                    | Self::Patience(_)
                    | Self::Open
                    | Self::Decide(_)
            )
    }
}

/// The step that the command said it would do, as an infinitive.
impl fmt::Display for Undo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Remove(path) => write!(f, "write {}", path.display()),
            Self::Detach => write!(f, "attach the hypervisor"),
            Self::Switch { cpu, .. } => write!(f, "switch CPU {cpu}"),
            Self::Thaw(path) => write!(f, "freeze the file system at {}", path.display()),
            Self::Release(array) => write!(f, "hold the array {}", array.name),
            Self::SwapOn(area) => write!(f, "switch off swap on {}", area.path.display()),
            Self::Unfreeze(group) => write!(f, "freeze the control group {}", group.display()),
            Self::Patience(_) => write!(f, "shorten the patience of the kernel's freezer"),
            Self::Return { from, .. } => write!(f, "gather processes in {}", from.display()),
            Self::Open => write!(f, "commit the move"),
            Self::CallOff(_) => write!(f, "move"),
            Self::Decide(_) => write!(f, "wait for the destination"),
        }
    }
}

/// The undo process, as its parent sees it.
#[derive(Debug)]
pub struct UndoProcess {
    child: Child,
    line: Option<ChildStdin>,
    told: Instant,
}

impl UndoProcess {
    /// Starts the process; it ends quietly when this is dropped.
    ///
    /// # Errors
    ///
    /// Returns an error if it cannot be started.
    pub fn start() -> Result<Self> {
        let failed = |error: io::Error| {
            Error::new(Exit::Failed, format!("the undo process could not be started: {error}"))
                .hint("nothing was changed")
        };
        let mut command = Command::new("/proc/self/exe");
        // Signals of the terminal are for the parent.
        command.arg("undo").stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        let mut child = command.spawn().map_err(failed)?;
        let line = child.stdin.take();
        Ok(Self { child, line, told: Instant::now() })
    }

    /// Returns the number of the process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Tells the process of the next step.
    ///
    /// # Errors
    ///
    /// Returns an error if the process is gone.
    pub fn will(&mut self, undo: &Undo) -> io::Result<()> {
        self.say(&serde_json::to_string(undo)?)
    }

    /// Tells the process that this one is making progress.
    pub fn hear(&mut self) {
        if self.told.elapsed() > Duration::from_secs(1) {
            let _ = self.say(ALIVE);
        }
    }

    /// Tells it so repeatedly while `work` runs, but not for ever.
    pub fn hear_during<T: Send>(&mut self, work: impl FnOnce() -> T + Send) -> T {
        let end = Instant::now() + WORK_PATIENCE;
        thread::scope(|scope| {
            let work = scope.spawn(work);
            while !work.is_finished() {
                if Instant::now() < end {
                    self.hear();
                }
                thread::sleep(Duration::from_millis(10));
            }
            work.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Tells the process that the move has ended: the machine goes on here.
    pub fn is_decided(&mut self) {
        let _ = self.say(DECIDED);
    }

    /// Tells the process that applications run, though some are still in Mercury's control groups.
    pub fn is_thawed(&mut self) {
        let _ = self.say(THAWED);
    }

    /// Tells the process that all applications run.
    pub fn is_released(&mut self) {
        let _ = self.say(RELEASED);
    }

    /// Tells the process that all steps so far are undone.
    pub fn is_undone(&mut self) {
        // A process that is gone need not know.
        let _ = self.say(UNDONE);
    }

    fn say(&mut self, text: &str) -> io::Result<()> {
        self.told = Instant::now();
        let line = self.line.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        line.write_all(format!("{text}\n").as_bytes())
    }
}

pub(super) const UNDONE: &str = "undone";
pub(super) const DECIDED: &str = "decided";
pub(super) const RELEASED: &str = "released";
pub(super) const THAWED: &str = "thawed";
pub(super) const ALIVE: &str = "alive";

impl Drop for UndoProcess {
    fn drop(&mut self) {
        self.is_undone();
        drop(self.line.take());
        let _ = self.child.wait();
    }
}
