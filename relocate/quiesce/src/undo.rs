//! The undo process: a child that undoes the changes of a checkpoint to the machine if the
//! command's process is killed or makes no progress. The child is told of each step before it is
//! done. It acts when the connection breaks, or is silent for too long.

use super::{applications, arrays, disks, swap, watchdogs::Feeder};
use crate::this_process;
use mercury_control::{
    device::{Access, Device},
    driver::{Direction, Driver},
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::{self, BufRead, Write},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// Time for which a process that holds the machine still may be silent: it may wait for something
/// that it holds itself.
const SILENCE: Duration = Duration::from_secs(60);
/// Time for work during which nothing can be heard: another host makes an image durable.
const WORK_PATIENCE: Duration = Duration::from_secs(600);
/// Time for which the thaw of one file system may delay the others, and applications.
const THAW_PATIENCE: Duration = Duration::from_secs(5);
/// Time for which the driver may be busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// Steps of a move. Only the mover knows how to undo them: this crate passes on what the mover said.
pub trait Moves: Send + Sync {
    /// Removes the fence that is left, and lets this machine answer for its addresses again.
    fn open_fence(&self);
    /// Calls off a move that was begun.
    fn call_off(&self, step: &Step);
    /// Finds out where the machine runs after a move that was committed.
    fn settle(&self, step: &Step);
}

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

/// A step to undo. The last step is undone first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Undo {
    /// A half-written file.
    Remove(PathBuf),
    /// The hypervisor beneath the machine.
    Detach,
    /// A frozen file system, by its mount point.
    Thaw(PathBuf),
    /// An array whose thread is held.
    Release(arrays::Array),
    /// A swap area that is off.
    SwapOn(swap::Area),
    /// A control group that is frozen.
    Unfreeze(PathBuf),
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
    fn holds(&self) -> bool {
        matches!(self, Self::Thaw(_) | Self::Unfreeze(_))
    }

    /// Returns true if this step belongs to holding applications still.
    fn belongs_to_hold(&self) -> bool {
        self.holds()
            || matches!(
                self,
                Self::Return { .. } | Self::Release(_) | Self::SwapOn(_) | Self::Open | Self::Decide(_)
            )
    }

    /// Undoes the step. A step that is undone already is no error.
    pub fn perform(&self, moves: &dyn Moves) {
        match self {
            Self::Remove(path) => drop(fs::remove_file(path)),
            Self::Detach => {
                // The kernel first ends the snapshot of the killed process.
                let end = Instant::now() + PATIENCE;
                let mut device = Device::open(Access::Control);
                while device.as_ref().is_err_and(|error| error.exit == Exit::Busy) && Instant::now() < end {
                    thread::sleep(Duration::from_millis(10));
                    device = Device::open(Access::Control);
                }
                drop(device.and_then(|device| device.switch(Direction::Detach, None)));
            }
            Self::Thaw(path) => drop(fs::File::open(path).and_then(|file| disks::thaw(&file))),
            Self::Release(array) => array.release(),
            Self::SwapOn(area) => drop(area.switch_on()),
            Self::Unfreeze(group) => drop(fs::write(group.join("cgroup.freeze"), "0")),
            Self::Return { from, to } => applications::give_back(from, to),
            Self::Open => moves.open_fence(),
            Self::CallOff(step) => moves.call_off(step),
            Self::Decide(step) => moves.settle(step),
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
        command.arg("guard").stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
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

const UNDONE: &str = "undone";
const DECIDED: &str = "decided";
const RELEASED: &str = "released";
const THAWED: &str = "thawed";
const ALIVE: &str = "alive";

impl Drop for UndoProcess {
    fn drop(&mut self) {
        self.is_undone();
        drop(self.line.take());
        let _ = self.child.wait();
    }
}

/// Runs the undo process: `mercury guard`. The files that the steps of a move need are opened by `open`, while everything
/// runs.
#[must_use]
pub fn run(open: impl FnOnce() -> Arc<dyn Moves>) -> Exit {
    // This program's file may be out of reach at an undo: a root on the network is behind the
    // fence.
    let _ = this_process::keep_in_memory();
    // If memory runs out this process is killed last, because without it a machine might stand
    // still for good.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let moves = open();
    let (sender, lines) = channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(io::Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    // Programs that stand still feed no watchdog.
    let mut feeder = None;
    let (steps, broken) = to_undo(&lines, SILENCE, &mut |stillness| match stillness {
        Stillness::Begins if feeder.is_none() => feeder = Some(Feeder::start(Sysroot::default())),
        Stillness::Begins => {}
        Stillness::Ended => feeder = None,
    });
    if !broken && let Some(parent) = rustix::process::getppid() {
        let _ = rustix::process::kill_process(parent, rustix::process::Signal::KILL);
    }
    undo_all(steps, THAW_PATIENCE, &moves);
    if !broken {
        // The message comes last, because its reader may have stood still.
        eprintln!("mercury: the command made no progress; everything that it held still was released");
    }
    Exit::Done
}

/// Undoes the steps, the last first. A file system whose device does not answer is thawed when it
/// does, and no other step waits for that.
fn undo_all(mut steps: Vec<Undo>, patience: Duration, moves: &Arc<dyn Moves>) {
    let (sender, ended) = channel();
    while let Some(undo) = steps.pop() {
        if !matches!(undo, Undo::Thaw(_)) {
            undo.perform(&**moves);
            continue;
        }
        let (sender, moves) = (sender.clone(), Arc::clone(moves));
        thread::spawn(move || {
            undo.perform(&*moves);
            let _ = sender.send(());
        });
        if let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(patience) {
            eprintln!("mercury: a file system does not thaw, because its device does not answer");
        }
    }
}

/// A message about the time for which applications are held still, or throttled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stillness {
    Begins,
    Ended,
}

/// Waits until the connection breaks, or is silent while a step holds applications still. Returns
/// the steps to undo, and true if the connection broke. Reports the times for which applications
/// are held still.
fn to_undo(
    lines: &Receiver<String>,
    silence: Duration,
    tell: &mut dyn FnMut(Stillness),
) -> (Vec<Undo>, bool) {
    let mut steps = Vec::new();
    loop {
        match lines.recv_timeout(silence) {
            Ok(text) => {
                match serde_json::from_str(&text) {
                    Ok(undo) => steps.push(undo),
                    Err(_) if text == UNDONE => steps.clear(),
                    Err(_) if text == DECIDED => steps.retain(|undo| !matches!(undo, Undo::Decide(_))),
                    Err(_) if text == THAWED => steps.retain(|undo| !matches!(undo, Undo::Unfreeze(_))),
                    Err(_) if text == RELEASED => steps.retain(|undo: &Undo| !undo.belongs_to_hold()),
                    Err(_) => {}
                }
                let frozen = steps.iter().any(|undo| matches!(undo, Undo::Unfreeze(_)));
                tell(if frozen { Stillness::Begins } else { Stillness::Ended });
            }
            // A step that holds a machine which may run at the destination lasts as long as needed.
            Err(RecvTimeoutError::Timeout) if matches!(steps.last(), Some(Undo::Decide(_))) => {}
            Err(RecvTimeoutError::Timeout) if steps.iter().any(Undo::holds) => return (steps, false),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return (steps, true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct NoMoves;

    impl Moves for NoMoves {
        fn open_fence(&self) {}
        fn call_off(&self, _: &Step) {}
        fn settle(&self, _: &Step) {}
    }

    fn no_moves() -> Arc<dyn Moves> {
        Arc::new(NoMoves)
    }

    fn told(texts: &[String]) -> Receiver<String> {
        let (sender, lines) = channel();
        texts.iter().for_each(|text| sender.send(text.clone()).expect("sent"));
        lines
    }

    #[test]
    fn what_was_not_undone_is_left() {
        let line = |undo: &Undo| serde_json::to_string(undo).expect("JSON");
        let thaw = Undo::Thaw("/".into());
        let texts = [line(&Undo::Detach), UNDONE.into(), line(&Undo::Detach), line(&thaw), "{\"Tha".into()];
        assert_eq!(to_undo(&told(&texts), SILENCE, &mut |_| ()), (vec![Undo::Detach, thaw], true));
        assert_eq!(to_undo(&told(&[UNDONE.into()]), SILENCE, &mut |_| ()), (vec![], true));
    }

    /// A thaw leaves the processes to be moved back; nothing holds applications still any more.
    #[test]
    fn a_thaw_leaves_the_groups() {
        let back = Undo::Return { from: "/a".into(), to: "/".into() };
        let line = |undo: &Undo| serde_json::to_string(undo).expect("JSON");
        let texts = [line(&back), line(&Undo::Unfreeze("/a".into())), THAWED.into()];
        let (steps, broken) = to_undo(&told(&texts), SILENCE, &mut |_| ());
        assert!(broken && !steps.iter().any(Undo::holds));
        assert_eq!(steps, [back]);
    }

    /// Watchdogs are fed from the first group that is frozen until all go on.
    #[test]
    fn stillness_is_told_from_the_first_group_to_the_release() {
        let line = |undo: &Undo| serde_json::to_string(undo).expect("JSON");
        let frozen = line(&Undo::Unfreeze("/a".into()));
        let texts =
            [line(&Undo::Detach), frozen.clone(), ALIVE.into(), RELEASED.into(), frozen, UNDONE.into()];
        let mut told_of = Vec::new();
        let _ = to_undo(&told(&texts), SILENCE, &mut |stillness| told_of.push(stillness));
        use Stillness::{Begins, Ended};
        assert_eq!(told_of, [Ended, Begins, Begins, Ended, Begins, Ended]);
    }

    /// A device that does not answer delays only its own file system.
    #[test]
    fn a_thaw_that_hangs_holds_up_nobody() {
        let root = tempfile::tempdir().expect("a folder");
        let (pipe, group) = (root.path().join("pipe"), root.path().join("group"));
        fs::create_dir(&group).expect("a folder");
        fs::write(group.join("cgroup.freeze"), "1").expect("a file");
        // Without a writer, opening the pipe does not return.
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).expect("a pipe");
        let steps = vec![Undo::Unfreeze(group.clone()), Undo::Thaw(pipe)];
        undo_all(steps, Duration::from_millis(20), &no_moves());
        assert_eq!(fs::read_to_string(group.join("cgroup.freeze")).expect("a file"), "0");
    }

    /// After the commit silence does not let the machine go. If the connection breaks the
    /// destination is asked first, and after the decision it is not asked again.
    #[test]
    fn a_move_that_was_committed_is_decided_first() {
        let doubt = Step::of(&"a move").expect("JSON");
        let [begun, committed] = [doubt.clone(), doubt];
        let steps = [
            Undo::Detach,
            Undo::CallOff(begun),
            Undo::Unfreeze("/a".into()),
            Undo::Open,
            Undo::Decide(committed),
        ];
        let texts: Vec<_> = steps.iter().map(|undo| serde_json::to_string(undo).expect("JSON")).collect();
        let (sender, lines) = channel();
        texts.iter().for_each(|text| sender.send(text.clone()).expect("sent"));
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            drop(sender);
        });
        assert_eq!(to_undo(&lines, Duration::from_millis(10), &mut |_| ()), (steps.to_vec(), true));
        let decided = [&texts[..], &[DECIDED.into()]].concat();
        assert_eq!(to_undo(&told(&decided), SILENCE, &mut |_| ()), (steps[..4].to_vec(), true));
        // The other end is told when everything goes on again.
        let released = [&decided[..], &[RELEASED.into()]].concat();
        assert_eq!(to_undo(&told(&released), SILENCE, &mut |_| ()), (steps[..2].to_vec(), true));
    }

    /// Silence matters only while applications stand still.
    #[test]
    fn silence_is_an_end() {
        let (sender, lines) = channel();
        let thaw = Undo::Thaw("/".into());
        for undo in [Undo::Detach, thaw.clone()] {
            sender.send(serde_json::to_string(&undo).expect("JSON")).expect("sent");
        }
        assert_eq!(
            to_undo(&lines, Duration::from_millis(10), &mut |_| ()),
            (vec![Undo::Detach, thaw], false)
        );
        // A reader of the image may then be slow.
        let returned = Undo::Return { from: "/a".into(), to: "/b".into() };
        for undo in [Undo::Detach, returned, Undo::Unfreeze("/a".into())] {
            sender.send(serde_json::to_string(&undo).expect("JSON")).expect("sent");
        }
        sender.send(RELEASED.into()).expect("sent");
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            drop(sender);
        });
        assert_eq!(to_undo(&lines, Duration::from_millis(10), &mut |_| ()), (vec![Undo::Detach], true));
    }
}
