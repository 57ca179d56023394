//! The destination of a move on a host that stays in use. Pages that arrive go into the memory of a guest
//! that has not begun. The source's `Commit` starts it.

use crate::{claim, group, no_keeper, options, signals::Stopping, status, tell, tell_of_running};
use mercury_abi::restart::{LoadEntry, MERCURY_LOAD_ZERO};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use mercury_devices::{
    Witness,
    memory::{View, read, write},
};
use mercury_guest::{
    disks::OwnDisk,
    fit::{CpuLimit, Limits, MemoryLimit, ServerDisks},
    run::{Handle, Plan, Prepared, Running},
};
use mercury_guests::{Console, Folder, Keeper, LifeArgs, Name, NotAdmitted, Phase, Root, Status};
use mercury_image::{FileSystem, Machine, PAGE};
use mercury_migration::{announcement::ETHER_TYPE, protocol::Attempt, wire::Chunks};
use mercury_quiesce::ethernet::{self, Card, packets::Packets};
use mercury_relocation::{
    migrate::offer::{Offer, OfferedDisk},
    operator::Operator,
    receive::{
        files::Files,
        spare::{Memory, Progress, Spare},
    },
};
use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

/// A machine that has arrived, and runs.
pub struct Arrived {
    pub running: Running,
    pub folder: Folder,
    pub name: Name,
}

/// A machine on its way.
struct Arrival {
    name: Name,
    folder: Folder,
    status: Status,
    /// The contents of its disks. New files go before their locks, so that no other arrival has taken them
    /// meanwhile.
    files: Option<Files>,
    prepared: Prepared,
    operator: Operator,
    _locks: Vec<File>,
}

/// Names the contents of disks that arrive for the monitor.
fn contents(files: &Option<Files>) -> Vec<OwnDisk> {
    let places = files.iter().flat_map(Files::places).cloned();
    places.map(|(name, path)| OwnDisk { name, path, read_only: false, arrives: true }).collect()
}

/// What the operator allows a machine.
#[derive(Clone, Debug, Default)]
pub struct Allowance {
    /// Largest memory of the machine in MiB.
    pub memory_limit: Option<u64>,
    /// Folder for the contents of its disks.
    pub disk_folder: Option<PathBuf>,
}

/// The means of this process that a guest gets.
pub struct Means {
    pub stopping: Stopping,
    /// Removes the guest's folder.
    pub keeper: Keeper,
}

/// This host as a destination.
pub struct Beside {
    /// The guests of this host.
    root: Root,
    life: LifeArgs,
    allowance: Allowance,
    stopping: Stopping,
    /// The keeper, unless it has a folder.
    keeper: Option<Keeper>,
    /// Takes the machine that runs. Returns false if nobody waits for it.
    take: Box<dyn Fn(Arrived) -> bool + Send>,
    arrival: Option<Arrival>,
    /// The machine that was started, and its name.
    started: Option<(Handle, Name)>,
    packets: Option<Packets>,
    cards: Vec<Card>,
    /// Announcements that the guest has sent.
    frames: Frames,
}

/// Payloads of announcements.
type Frames = Arc<Mutex<VecDeque<Vec<u8>>>>;

/// Keeps a frame of the guest's that is an announcement. A guest that sends too many displaces
/// its own.
fn keep_announcement(frames: &Frames, frame: &[u8]) {
    const HEADER: usize = 14;
    const MOST: usize = 64;
    if frame.get(HEADER - 2..HEADER) != Some(&ETHER_TYPE.to_be_bytes()) {
        return;
    }
    let mut frames = frames.lock().unwrap_or_else(PoisonError::into_inner);
    if frames.len() == MOST {
        frames.pop_front();
    }
    frames.push_back(frame[HEADER..].to_vec());
}

impl Beside {
    /// Makes the destination. `take` gets the machine when it runs, and returns true if it keeps it.
    pub fn new(
        life: LifeArgs,
        allowance: Allowance,
        Means { stopping, keeper }: Means,
        take: impl Fn(Arrived) -> bool + Send + 'static,
    ) -> Self {
        Self {
            root: Root::own(),
            life,
            allowance,
            stopping,
            keeper: Some(keeper),
            take: Box::new(take),
            arrival: None,
            started: None,
            // Without them, only the connection carries words to the source.
            packets: Packets::open(ETHER_TYPE).ok(),
            cards: ethernet::cards(&Sysroot::default()),
            frames: Frames::default(),
        }
    }

    /// Returns true if this process may announce words on the network.
    pub fn can_announce(&self) -> bool {
        self.packets.is_some()
    }

    fn admit(&mut self, offer: &Offer) -> Result<Arrival> {
        if offer.cpus != offer.machine.cpus.len() {
            return Err(Error::fault("its offer does not name all of its processors"));
        }
        // Without a card, the random numbers are the sign that the kernel has gone on.
        let sign = if self.life.net.is_some() { "virtio_net" } else { "virtio_rng" };
        // Two arrivals at once see neither the same memory nor the same room and files for their disks.
        let admitting = self.root.admit_one().map_err(not_admitted)?;
        // Dropped after the files, however this ends.
        let locks;
        let files = self.make_files(&offer.disks)?;
        let memory = match self.allowance.memory_limit {
            Some(limit) => MemoryLimit::Given(limit),
            None => {
                let promised = self.root.promised_bytes().map_err(unreadable)?;
                MemoryLimit::AvailableToArrivals { promised }
            }
        };
        let cpus = CpuLimit::of(self.life.overcommit_cpus);
        // A machine that moves has one life.
        let limits = Limits { memory, cpus, servers: ServerDisks::Guarded };
        let mut plan = Plan::of(offer.machine.clone(), &["virtio_mmio", sign], &contents(&files), limits)?;
        locks = plan.take_locks();
        let name = self.life.name.clone().unwrap_or_else(|| Name::of_machine(&offer.machine.host));
        let mut folder = claim(&self.root, &name)?;
        let mut status = status(&name, plan.machine(), plan.memory());
        status.phase = Phase::Arriving;
        // The next machine sees the memory of this one.
        tell(&folder, &status)?;
        drop(admitting);
        // Memory belongs to the group that a process was in when it got the memory.
        group::enter(&mut status, false);
        tell(&folder, &status)?;
        let frames = Arc::clone(&self.frames);
        let witness: Witness = Box::new(move |frame| keep_announcement(&frames, frame));
        let options = options(&self.life, Console::Socket, Vec::new(), &folder)?;
        let prepared = plan.prepare(&options, Some(witness))?;
        if let Some(keeper) = self.keeper.take() {
            folder.entrust(keeper).map_err(no_keeper)?;
        }
        Ok(Arrival {
            name,
            folder,
            status,
            files,
            prepared,
            operator: Operator::at_pipe(&options.words),
            _locks: locks,
        })
    }

    /// Makes files for disks that come along.
    fn make_files(&self, offered: &[OfferedDisk]) -> Result<Option<Files>> {
        if offered.is_empty() {
            return Ok(None);
        }
        let refused = |why: String| {
            Error::new(Exit::Impossible, why)
                .hint("make room in the folder of --disk-folder, or name another one")
        };
        let folder = self.allowance.disk_folder.as_deref().ok_or_else(|| {
            let text = "its disks come along, and `receive --beside` has no folder for them";
            Error::new(Exit::Impossible, text).hint("give one with --disk-folder, or leave --with-disk out")
        })?;
        Files::make(folder, offered).map(Some).map_err(refused)
    }

    /// Forgets a machine of which no instruction has run.
    fn discard(&mut self) {
        if let Some(arrival) = self.arrival.take() {
            self.keeper = arrival.folder.dismiss();
        } else {
            return;
        }
        self.stopping.hold().release();
    }
}

impl Spare for Beside {
    fn prepare(&mut self, offer: &Offer) -> std::result::Result<(), String> {
        self.discard();
        let arrival = self.admit(offer).map_err(|error| {
            let hint = error.hint.map(|hint| format!(" ({hint})")).unwrap_or_default();
            error.message + &hint
        })?;
        note!("mercury: {} would go on here as the guest {}", offer.machine.host, arrival.name);
        self.arrival = Some(arrival);
        Ok(())
    }

    fn memory(&self) -> Arc<dyn Memory> {
        let view = self.arrival.as_ref().map(|arrival| arrival.prepared.memory().clone());
        Arc::new(Room(view.unwrap_or_default()))
    }

    fn write_disk(&mut self, chunks: &Chunks) -> Result<()> {
        let files = self.arrival.as_mut().and_then(|arrival| arrival.files.as_mut());
        let files =
            files.ok_or_else(|| Error::fault("chunks of a disk have arrived that was not offered"))?;
        files.write(chunks)
    }

    fn begin_sync(&mut self) {
        if let Some(files) = self.arrival.as_mut().and_then(|arrival| arrival.files.as_mut()) {
            files.begin_sync();
        }
    }

    fn complete_disks(
        &mut self,
        offered: &[OfferedDisk],
        attempt: Attempt,
    ) -> std::result::Result<(), String> {
        match self.arrival.as_mut().and_then(|arrival| arrival.files.as_mut()) {
            Some(files) => files.complete(offered, attempt),
            None if offered.is_empty() => Ok(()),
            None => Err("its disks were not offered before".into()),
        }
    }

    fn note_complete(&mut self) {
        let Some(arrival) = &mut self.arrival else { return };
        self.stopping.hold().protect(arrival.name.clone());
        arrival.status.phase = Phase::Complete;
        if let Err(error) = tell(&arrival.folder, &arrival.status) {
            note!("mercury: {error}; until then `mercury guests adopt` does not find the machine");
        }
    }

    fn is_over(&self) -> bool {
        self.stopping.is_over()
    }

    fn describe(&mut self, machine: &Machine) {
        if let Some(arrival) = &mut self.arrival {
            arrival.prepared.set_timers(machine.timers.clone());
        }
    }

    fn go(&mut self) -> Result<()> {
        // A signal that comes meanwhile ends the guest, and not a machine whose source has given it up.
        let held = self.stopping.hold();
        let arrival = self.arrival.take().ok_or_else(|| Error::fault("no machine has arrived"))?;
        // The locks go last if the start fails.
        let Arrival { _locks, name, folder, mut status, prepared, files, .. } = arrival;
        let running = match prepared.start() {
            Ok(running) => running,
            Err(error) => {
                self.keeper = folder.dismiss();
                held.release();
                return Err(error);
            }
        };
        if let Some(files) = files {
            files.keep();
        }
        held.hand_over(running.handle());
        self.started = Some((running.handle(), name.clone()));
        status.phase = Phase::Running;
        tell_of_running(&folder, &status);
        if !(self.take)(Arrived { running, folder, name }) {
            note!("mercury: the command is about to end, and the machine with it");
        }
        Ok(())
    }

    fn word(&mut self, words: &[&'static str]) -> Option<&'static str> {
        if self.arrival.is_some() && self.stopping.is_over() {
            return words.iter().find(|word| **word == "discard").copied();
        }
        self.arrival.as_mut()?.operator.word(words)
    }

    fn progress(&self) -> Progress {
        match &self.started {
            Some((machine, _)) if machine.has_ended() => Progress::Ended,
            // With a card, the machine announces that its applications go on.
            Some((machine, _)) if self.life.net.is_none() && machine.is_awake() => Progress::Running,
            _ => Progress::Starting,
        }
    }

    fn stage(&self) -> String {
        self.started.as_ref().map_or_else(String::new, |(machine, name)| stage(name, machine.is_awake()))
    }

    fn release(&mut self) -> Result<()> {
        self.discard();
        Ok(())
    }

    /// The machine's file systems are on servers, or on disks that came along and were compared as a whole.
    /// [`Plan`] refuses others.
    fn changed_disks(&self, _: &[FileSystem]) -> Vec<String> {
        Vec::new()
    }

    /// The machine gets the monitor's card in place of its own ([`ethernet::takeover`]).
    fn cards(&self) -> Vec<Card> {
        Vec::new()
    }

    fn announce(&self, frame: &[u8]) {
        let Some(packets) = &self.packets else { return };
        for card in self.cards.iter().filter(|card| card.up) {
            // If the announcement fails, a connection may still carry the word.
            let _ = packets.say(card, frame);
        }
    }

    fn hear(&self) -> Option<Vec<u8>> {
        let seen = self.frames.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        seen.or_else(|| self.packets.as_ref()?.hear())
    }

    fn ear(&self) -> Option<BorrowedFd<'_>> {
        self.packets.as_ref().map(AsFd::as_fd)
    }
}

/// Returns the error of a machine that has to wait for another one too long.
pub fn not_admitted(why: NotAdmitted) -> Error {
    let (limit, holder) = match why {
        NotAdmitted::Unreadable(error) => return unreadable(error),
        NotAdmitted::Busy { limit, holder } => (limit, holder),
    };
    let by = holder.as_ref().map_or_else(|| "another process".into(), ToString::to_string);
    let text = format!("{by} has been admitting a machine on this host for {} s or more", limit.as_secs());
    let hint = match holder.as_ref().map(|holder| (holder.pid, holder.is_stopped)) {
        Some((pid, true)) => {
            format!("let it go on there with `kill -CONT {pid}`, and move the machine again")
        }
        Some((pid, false)) => format!("see there what it waits for, or end it with `kill -KILL {pid}`"),
        None => "find it there with `lslocks`: it has a lock of a folder `mercury/guests`".into(),
    };
    Error::new(Exit::Busy, text).hint(hint)
}

pub fn unreadable(error: io::Error) -> Error {
    Error::new(Exit::Failed, format!("cannot see which guests run here: {error}"))
        .hint("make the folder /run/mercury/guests, or $XDG_RUNTIME_DIR, writable")
}

/// Describes the wait in which a guest is whose kernel is awake or not, and names its console.
fn stage(name: &Name, is_awake: bool) -> String {
    let wait = if is_awake {
        "its kernel has found the monitor's devices, and the command in it sets the network up"
    } else {
        "its CPUs or its own devices have not woken up yet"
    };
    format!("{wait} (`mercury guests console {name}` shows more, `mercury guests stop {name}` ends it)")
}

/// The memory of a guest that has not begun.
struct Room(View);

impl Memory for Room {
    fn load(&self, entries: &[LoadEntry], data: &[u8]) -> Result<()> {
        let mut pages = data.chunks_exact(PAGE);
        for entry in entries {
            let phys = entry.frame_phys;
            let put = match entry.source {
                MERCURY_LOAD_ZERO => self.clear(phys),
                _ => pages.next().and_then(|page| write(&self.0, phys, page)),
            };
            put.ok_or_else(|| outside(phys))?;
        }
        Ok(())
    }

    fn read_back(&self, entries: &[LoadEntry]) -> Result<Vec<u8>> {
        let mut data = vec![0; entries.len() * PAGE];
        for (entry, page) in entries.iter().zip(data.chunks_exact_mut(PAGE)) {
            read(&self.0, entry.frame_phys, page).ok_or_else(|| outside(entry.frame_phys))?;
        }
        Ok(data)
    }
}

impl Room {
    /// Clears a page. One that is clear is not written, so that the host need not have it.
    fn clear(&self, phys: u64) -> Option<()> {
        let mut page = [0; PAGE];
        read(&self.0, phys, &mut page)?;
        if page.iter().all(|byte| *byte == 0) { Some(()) } else { write(&self.0, phys, &[0; PAGE]) }
    }
}

fn outside(phys: u64) -> Error {
    Error::fault(format!("a page has arrived for {phys:#x}, where the machine has no memory"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_abi::restart::MERCURY_LOAD_DATA;
    use mercury_guests::held::Holder;
    use mercury_relocation::migrate::disk::Disk;
    use std::{fs, path::Path, thread, time::Duration};

    #[test]
    fn announcements_of_the_guest_are_kept_and_no_other_frame() {
        let frames = Frames::default();
        let frame = |kind: u16, text: &[u8]| [&[0; 12][..], &kind.to_be_bytes(), text].concat();
        for (kind, text) in [(0x0800, &b"packet"[..]), (ETHER_TYPE, b"started"), (ETHER_TYPE, b"")] {
            keep_announcement(&frames, &frame(kind, text));
        }
        keep_announcement(&frames, b"short");
        assert_eq!(*frames.lock().expect("no panic"), [b"started".to_vec(), Vec::new()]);
        for number in 0..100_u8 {
            keep_announcement(&frames, &frame(ETHER_TYPE, &[number]));
        }
        let frames = frames.lock().expect("no panic");
        assert_eq!((frames.len(), frames[63].clone()), (64, vec![99]));
    }

    #[test]
    fn the_process_that_holds_up_an_arrival_has_a_name() {
        let refused = |holder| not_admitted(NotAdmitted::Busy { limit: Duration::from_secs(10), holder });
        let holder = Holder { pid: 77, program: "mercury-guest".into(), is_stopped: true };
        let error = refused(Some(holder.clone()));
        assert_eq!(error.exit, Exit::Busy);
        let text = "process 77 (mercury-guest, stopped) has been admitting a machine on this host for 10 s";
        assert!(error.message.starts_with(text), "{error}");
        assert!(error.hint.is_some_and(|hint| hint.contains("kill -CONT 77")));
        let error = refused(Some(Holder { is_stopped: false, ..holder }));
        assert!(error.hint.is_some_and(|hint| hint.contains("kill -KILL 77")));
        let error = refused(None);
        assert!(error.message.starts_with("another process") && error.hint.is_some(), "{error}");
        let unreadable = not_admitted(NotAdmitted::Unreadable(io::ErrorKind::PermissionDenied.into()));
        assert!(unreadable.message.contains("cannot see which guests"), "{unreadable}");
    }

    fn beside(root: &Path, disk_folder: &Path) -> Beside {
        let allowance = Allowance { disk_folder: Some(disk_folder.to_owned()), ..Allowance::default() };
        let keeper = Keeper::start().expect("a process");
        let means = Means { stopping: Stopping::default(), keeper };
        Beside {
            root: Root::at(root),
            ..Beside::new(LifeArgs::default(), allowance, means, |_| panic!("no machine can run"))
        }
    }

    /// Two arrivals that see each other's new files before the monitor has them would both write to one, or
    /// one that is refused would remove the other's.
    #[test]
    fn an_arrival_makes_no_file_while_another_one_is_admitted() {
        let place = tempfile::tempdir().expect("a folder");
        let (guests, disks) = (place.path().join("guests"), place.path().join("disks"));
        fs::create_dir(&disks).expect("a folder");
        let (root, mut second) = (Root::at(&guests), beside(&guests, &disks));
        let disk = Disk { path: "/dev/nvme0n1".into(), bytes: 1 << 20, ..Disk::default() };
        let offer = Offer { disks: vec![OfferedDisk { disk, ..OfferedDisk::default() }], ..Offer::default() };
        let count = || fs::read_dir(&disks).expect("a folder").count();
        let first = root.admit_one().expect("admitted");
        let arrives = thread::spawn(move || second.prepare(&offer));
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(10));
            assert_eq!(count(), 0);
        }
        drop(first);
        // The offer describes no machine that could run.
        assert!(arrives.join().expect("an answer").is_err());
        assert_eq!((count(), root.guests().expect("a folder").len()), (0, 0));
    }

    #[test]
    fn each_wait_of_a_start_has_a_name_and_the_guest_s() {
        let name = Name::of_machine("node7");
        let [asleep, awake] = [false, true].map(|is_awake| stage(&name, is_awake));
        assert!(asleep.contains("own devices") && awake.contains("sets the network up"), "{asleep}; {awake}");
        for text in [asleep, awake] {
            assert!(text.contains("guests console node7") && text.contains("guests stop node7"), "{text}");
        }
    }

    #[test]
    fn pages_go_to_their_addresses_and_come_back() {
        let room =
            Room(View::from_ranges(&[(vm_memory::GuestAddress(0x10_0000), 4 * PAGE)]).expect("memory"));
        let entry = |frame_phys, source| LoadEntry { frame_phys, source };
        let both = [entry(0x10_1000, MERCURY_LOAD_DATA), entry(0x10_2000, MERCURY_LOAD_ZERO)];
        room.load(&both, &[7; PAGE]).expect("loaded");
        assert_eq!(room.read_back(&both).expect("read"), [[7; PAGE], [0; PAGE]].concat());
        // A page that became zeros again.
        let again = [entry(0x10_1000, MERCURY_LOAD_ZERO)];
        room.load(&again, &[]).expect("loaded");
        assert_eq!(room.read_back(&again).expect("read"), [0; PAGE]);
        for outside in [0, 0x10_4000, !0xFFF] {
            assert!(room.load(&[entry(outside, MERCURY_LOAD_ZERO)], &[]).is_err());
            assert!(room.load(&[entry(outside, MERCURY_LOAD_DATA)], &[1; PAGE]).is_err());
            assert!(room.read_back(&[entry(outside, MERCURY_LOAD_DATA)]).is_err());
        }
    }
}
