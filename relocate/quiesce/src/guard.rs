//! The undo process's own side: `mercury undo`.

use super::{
    applications, disks, patient, this_process,
    undo::{DECIDED, RELEASED, Step, THAWED, UNDONE, Undo},
    watchdogs::Feeder,
};
use mercury_control::{
    cpus::CpuSet,
    device::{Access, Device},
    driver::{Direction, Driver},
    error::Result,
    exit::Exit,
    sysroot::Sysroot,
};
use std::{
    fs,
    io::{self, BufRead},
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

/// Runs the undo process. The files that the steps of a move need are opened by `open`, while
/// everything runs.
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
    let silent = no_progress(&steps);
    undo_all(steps, THAW_PATIENCE, &moves);
    if !broken {
        // The message comes last, because its reader may have stood still.
        eprintln!("{silent}");
    }
    Exit::Done
}

/// Makes the message for a command that made no progress.
fn no_progress(steps: &[Undo]) -> String {
    let image = steps.iter().rev().find_map(|undo| match undo {
        Undo::Remove(path) => Some(format!(" while it wrote {}", path.display())),
        _ => None,
    });
    let last = steps.last().map(|undo| format!(" after it began to {undo}")).unwrap_or_default();
    format!(
        "mercury: the command made no progress for {} s{last}{}; everything that it held still was released: \
         see in `dmesg` which disk or server does not answer",
        SILENCE.as_secs(),
        image.unwrap_or_default()
    )
}

/// Undoes the step. A step that is undone already is no error.
fn undo_step(step: &Undo, moves: &dyn Moves) {
    match step {
        Undo::Remove(path) => drop(patient::remove(path)),
        Undo::Detach => drop(driver().and_then(|device| device.switch(Direction::Detach, None))),
        Undo::Switch { cpu, attach } => {
            let direction = if *attach { Direction::Attach } else { Direction::Detach };
            let one: CpuSet = [*cpu].into_iter().collect();
            drop(driver().and_then(|device| device.switch_for_now(direction, &one)));
        }
        Undo::Thaw(path) => drop(fs::File::open(path).and_then(|file| disks::thaw(&file))),
        Undo::Release(array) => array.release(),
        Undo::SwapOn(area) => drop(area.switch_on()),
        Undo::Unfreeze(group) => drop(fs::write(group.join("cgroup.freeze"), "0")),
        Undo::Patience(number) => number.put_back(),
        Undo::Return { from, to } => applications::give_back(from, to),
        Undo::Open => moves.open_fence(),
        Undo::CallOff(facts) => moves.call_off(facts),
        Undo::Decide(facts) => moves.settle(facts),
    }
}

/// Opens the driver when the kernel has ended the snapshot of the killed process.
fn driver() -> Result<Device> {
    let end = Instant::now() + PATIENCE;
    let mut device = Device::open(Access::Control);
    while device.as_ref().is_err_and(|error| error.exit == Exit::Busy) && Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
        device = Device::open(Access::Control);
    }
    device
}

/// Undoes the steps, the last first. A file system whose device does not answer is thawed when it
/// does, and no other step waits for that.
fn undo_all(mut steps: Vec<Undo>, patience: Duration, moves: &Arc<dyn Moves>) {
    let (sender, ended) = channel();
    while let Some(undo) = steps.pop() {
        if !matches!(undo, Undo::Thaw(_)) {
            undo_step(&undo, &**moves);
            continue;
        }
        let (sender, moves) = (sender.clone(), Arc::clone(moves));
        thread::spawn(move || {
            undo_step(&undo, &*moves);
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
                let stopped = steps.iter().any(Undo::stops_programs);
                tell(if stopped { Stillness::Begins } else { Stillness::Ended });
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
    use super::{
        super::undo::{ALIVE, Number},
        *,
    };

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
    fn steps_not_undone_remain() {
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

    /// Watchdogs are fed too if nothing but the kernel's own freezer stops programs.
    #[test]
    fn the_instant_alone_is_a_standstill() {
        let patience = Undo::Patience(Number { file: "/patience".into(), was: "20000".into() });
        let texts = [serde_json::to_string(&patience).expect("JSON"), THAWED.into(), RELEASED.into()];
        let mut told_of = Vec::new();
        assert_eq!(to_undo(&told(&texts), SILENCE, &mut |stillness| told_of.push(stillness)), (vec![], true));
        assert_eq!(told_of, [Stillness::Begins, Stillness::Begins, Stillness::Ended]);
        // No silence ends it: only a step that holds applications by itself has a limit.
        let (sender, lines) = channel();
        sender.send(texts[0].clone()).expect("sent");
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            drop(sender);
        });
        assert_eq!(to_undo(&lines, Duration::from_millis(10), &mut |_| ()), (vec![patience], true));
    }

    #[test]
    fn the_patience_of_the_kernel_s_freezer_is_put_back() {
        let root = tempfile::tempdir().expect("a folder");
        let file = root.path().join("pm_freeze_timeout");
        fs::write(&file, "1500").expect("a file");
        let number = Number { file: file.clone(), was: "20000".into() };
        undo_all(vec![Undo::Patience(number)], Duration::from_millis(20), &no_moves());
        assert_eq!(fs::read_to_string(file).expect("a file"), "20000");
    }

    /// A device that does not answer delays only its own file system.
    #[test]
    fn a_thaw_that_hangs_delays_no_other() {
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

    #[test]
    fn silence_names_the_last_step() {
        let steps = [Undo::Remove("/mnt/x.part".into()), Undo::Detach, Undo::Thaw("/data".into())];
        let said = no_progress(&steps);
        assert!(said.contains("for 60 s after it began to freeze the file system at /data"), "{said}");
        assert!(said.contains(" while it wrote /mnt/x.part; "), "{said}");
        assert!(no_progress(&[]).contains("no progress for 60 s; everything"), "{}", no_progress(&[]));
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
