//! `/dev/mercury`: the only module that talks to the kernel in its own terms. Most of the command's
//! unsafe code is here (the benchmarks have some of their own).

use crate::{
    cpus::CpuSet,
    driver::{Direction, Driver},
    error::{Error, Result},
    exit::Exit,
};
use mercury_abi::{
    Header,
    code::Code,
    facts::CpuFacts,
    gate::{IntegrityCall, MERCURY_INTEGRITY_SHIFT},
    ioctl::{
        CpuStatus, DiskLogRequest, FaultRequest, FencePeer, FenceRequest, FirmwareRequest, IntegrityRequest,
        LoadFramesRequest, LoadRequest, LogRequest, MEND_MAX, MERCURY_DISK_LOG_BEGIN,
        MERCURY_DISK_LOG_COLLECT, MERCURY_DISK_LOG_END, MERCURY_FACTS_REGISTERS, MERCURY_FENCE_DOWN,
        MERCURY_FENCE_FORGET, MERCURY_FENCE_OPEN_HERE, MERCURY_FENCE_RETURN, MERCURY_FENCE_STAYS,
        MERCURY_IOC_ATTACH, MERCURY_IOC_DETACH, MERCURY_IOC_DISK_LOG, MERCURY_IOC_FACTS, MERCURY_IOC_FAULT,
        MERCURY_IOC_FENCE, MERCURY_IOC_FIRMWARE, MERCURY_IOC_INTEGRITY, MERCURY_IOC_LOAD,
        MERCURY_IOC_LOG_BEGIN, MERCURY_IOC_LOG_COLLECT, MERCURY_IOC_MEASURE, MERCURY_IOC_MEND,
        MERCURY_IOC_POSTMORTEM, MERCURY_IOC_RESTORE_BEGIN, MERCURY_IOC_RESTORE_GO, MERCURY_IOC_RESTORE_LOAD,
        MERCURY_IOC_RESTORE_READ, MERCURY_IOC_ROLLBACK, MERCURY_IOC_SNAPSHOT_BEGIN, MERCURY_IOC_SNAPSHOT_END,
        MERCURY_IOC_SNAPSHOT_MACHINE, MERCURY_IOC_SNAPSHOT_PREPARE, MERCURY_IOC_SNAPSHOT_READ,
        MERCURY_IOC_SNAPSHOT_READ_PRESENT, MERCURY_IOC_STATUS, MERCURY_IOC_SYSTEM, MERCURY_IOC_UNLOAD,
        MERCURY_IOC_WATCH, MERCURY_IOC_WATCH_STATUS, MERCURY_POSTMORTEM_DROP, MERCURY_SWITCH_FOR_NOW,
        MeasureRequest, MendRequest, Outcome, PostmortemRequest, RestartRequest, SnapshotReadRequest,
        SnapshotRequest, StatusRequest, SwitchRequest, SwitchResult, SystemInfo, WatchRequest,
    },
    restart::{LoadEntry, RestartCpu, RestartRange},
    shared::{SHARED_CPU_SIZE, SHARED_MAGIC, SharedCpu},
    snapshot::EndedCpu,
};
use rustix::{
    fs::{CWD, Mode, OFlags},
    io::Errno,
    ioctl::{Updater, ioctl},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};
use std::{
    fs::File,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

pub const PATH: &str = "/dev/mercury";
/// Name in the folder of devices.
const NAME: &str = "mercury";

/// The way in which the device is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// For reading: any number of processes at a time.
    Observe,
    /// For changes: one process at a time.
    Control,
}

#[derive(Debug)]
pub struct Device {
    fd: OwnedFd,
}

/// The part of a machine's life after the instant in which the fence keeps it silent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Silent {
    /// The first life, which ends; the restored machine goes on with its connections.
    #[default]
    First,
    /// Both: in the first life the machine talks only to the fence's peers, and in the second one
    /// to no peer until the fence is taken away.
    Both,
    /// The second life, until the fence is taken away.
    Second,
}

impl Silent {
    fn flags(self) -> u64 {
        match self {
            Self::First => 0,
            Self::Both => MERCURY_FENCE_RETURN,
            Self::Second => MERCURY_FENCE_RETURN | MERCURY_FENCE_OPEN_HERE,
        }
    }
}

/// Returns an empty request to the watch.
pub(crate) fn no_watch() -> WatchRequest {
    WatchRequest {
        header: Header::of::<WatchRequest>(),
        flags: 0,
        acts: 0,
        tiers: 0,
        hpet_code: 0,
        perf_code: 0,
        cpus: 0,
        reserved: 0,
        ticks: 0,
        alarms: 0,
        longest_ms: 0,
        message: [0; 128],
        outcome: Outcome::default(),
    }
}

/// The outcome of an operation that has none in its structure.
const NO_OUTCOME: Outcome = Outcome { code: 0, cpu: u32::MAX, detail: [0; 2] };

impl Device {
    pub fn open(access: Access) -> Result<Self> {
        Self::open_at(CWD, PATH, access)
    }

    /// Opens the device in this folder, without looking up a name from the root.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::open`] does.
    pub fn open_in(devices: impl AsFd, access: Access) -> Result<Self> {
        Self::open_at(devices, NAME, access)
    }

    fn open_at(folder: impl AsFd, path: &str, access: Access) -> Result<Self> {
        let flags = match access {
            Access::Observe => OFlags::RDONLY,
            Access::Control => OFlags::RDWR,
        };
        match rustix::fs::openat(folder, path, flags | OFlags::CLOEXEC, Mode::empty()) {
            Ok(fd) => Ok(Self { fd }),
            Err(Errno::BUSY) => Err(busy()),
            Err(Errno::NOENT | Errno::NXIO | Errno::NODEV) => Err(no_driver()),
            Err(errno) => Err(Error::system("opening /dev/mercury", errno)),
        }
    }

    /// Makes one request. `Value` is the structure that `REQUEST` was made from.
    fn request<const REQUEST: u32, Value>(&self, value: &mut Value) -> rustix::io::Result<()> {
        const { assert!(REQUEST >> 16 & 0x3fff == size_of::<Value>() as u32) };
        // SAFETY: the request's number carries the size of `Value` (asserted above), so the driver
        // reads and writes exactly the bytes of this exclusive reference.
        let updater = unsafe { Updater::<REQUEST, Value>::new(value) };
        // SAFETY: the requests of Mercury's driver touch no other memory than `Value` and the
        // buffers in it. The callers below put only addresses of their own live buffers there.
        unsafe { ioctl(&self.fd, updater) }
    }
}

/// Makes the error of a failed request: the driver's reason if it gave one, else the errno's.
fn failure(action: &str, result: rustix::io::Result<()>, outcome: &Outcome) -> Result<()> {
    match (Error::from_outcome(action, outcome), result) {
        (Some(error), _) => Err(error),
        (None, Err(errno)) => Err(Error::system(action, errno)),
        (None, Ok(())) => Ok(()),
    }
}

fn no_driver() -> Error {
    Error { code: Some(Code::NotLoaded), ..Error::new(Exit::State, "Mercury's driver is not loaded") }
        .hint("`mercury load` loads it")
}

fn busy() -> Error {
    let holder =
        Device::open(Access::Observe).and_then(|device| device.system()).map(|info| info.controller_pid);
    let who = match holder {
        Ok(pid) if pid != 0 => format!("process {pid}{}", process_name(pid)),
        _ => "another process".into(),
    };
    Error { code: Some(Code::Busy), ..Error::new(Exit::Busy, format!("{who} controls Mercury")) }
        .hint("wait until it is done, or end it; `mercury status` and `mercury log` work meanwhile")
}

fn process_name(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    if name.is_empty() { String::new() } else { format!(" ({})", name.trim()) }
}

/// Checks that the driver speaks this command's version before any other request.
fn same_version(theirs: &Header, ours: &Header) -> Result<()> {
    let mismatch =
        || Error::refused("talking to the driver", Code::AbiMismatch, None, [theirs.version.into(), 0]);
    if theirs == ours { Ok(()) } else { Err(mismatch()) }
}

impl Device {
    fn switch_with(
        &self,
        direction: Direction,
        cpus: Option<&CpuSet>,
        flags: u64,
    ) -> Result<Vec<SwitchResult>> {
        let mask = cpus.map(CpuSet::mask).unwrap_or_default();
        let mut results = vec![SwitchResult::default(); self.system()?.possible_cpus as usize];
        let mut request = SwitchRequest {
            header: Header::of::<SwitchRequest>(),
            mask_addr: if cpus.is_some() { address(mask.as_ptr()) } else { 0 },
            mask_words: mask.len() as u32,
            results_count: results.len() as u32,
            results_addr: address(results.as_mut_ptr()),
            flags,
            ..SwitchRequest::default()
        };
        let result = match direction {
            Direction::Attach => self.request::<MERCURY_IOC_ATTACH, _>(&mut request),
            Direction::Detach => self.request::<MERCURY_IOC_DETACH, _>(&mut request),
        };
        failure(direction.name(), result, &request.outcome)?;
        results.truncate(request.results_count as usize);
        Ok(results)
    }
}

impl Driver for Device {
    fn system(&self) -> Result<SystemInfo> {
        let header = Header::of::<SystemInfo>();
        let mut info = SystemInfo { header, ..SystemInfo::default() };
        let result = self.request::<MERCURY_IOC_SYSTEM, _>(&mut info);
        if result == Err(Errno::INVAL) {
            return Err(Error::refused("talking to the driver", Code::AbiMismatch, None, [0; 2]));
        }
        failure("asking the driver", result, &NO_OUTCOME)?;
        same_version(&info.header, &header)?;
        Ok(info)
    }

    fn facts(&self, cpu: u32) -> Result<Option<CpuFacts>> {
        let mut facts = CpuFacts { header: Header::of::<CpuFacts>(), cpu, ..CpuFacts::default() };
        match self.request::<MERCURY_IOC_FACTS, _>(&mut facts) {
            Err(Errno::NXIO) => Ok(None),
            result => failure("reading the processor", result, &NO_OUTCOME).map(|()| Some(facts)),
        }
    }

    fn load(&self) -> Result<()> {
        let mut request = LoadRequest { header: Header::of::<LoadRequest>(), ..LoadRequest::default() };
        let result = self.request::<MERCURY_IOC_LOAD, _>(&mut request);
        failure("load", result, &request.outcome)
    }

    fn unload(&self) -> Result<()> {
        let mut request = LoadRequest { header: Header::of::<LoadRequest>(), ..LoadRequest::default() };
        let result = self.request::<MERCURY_IOC_UNLOAD, _>(&mut request);
        failure("unload", result, &request.outcome)
    }

    fn switch(&self, direction: Direction, cpus: Option<&CpuSet>) -> Result<Vec<SwitchResult>> {
        self.switch_with(direction, cpus, 0)
    }

    fn switch_for_now(&self, direction: Direction, cpus: &CpuSet) -> Result<()> {
        // An attach of CPUs by name changes nothing for others.
        let flags = if direction == Direction::Detach { MERCURY_SWITCH_FOR_NOW } else { 0 };
        self.switch_with(direction, Some(cpus), flags).map(drop)
    }

    fn status(&self) -> Result<Vec<CpuStatus>> {
        let mut cpus = vec![CpuStatus::default(); self.system()?.possible_cpus as usize];
        let mut request = StatusRequest {
            header: Header::of::<StatusRequest>(),
            cpus_count: cpus.len() as u32,
            cpus_addr: address(cpus.as_mut_ptr()),
            ..StatusRequest::default()
        };
        let result = self.request::<MERCURY_IOC_STATUS, _>(&mut request);
        failure("asking for the status", result, &NO_OUTCOME)?;
        cpus.truncate(request.cpus_count as usize);
        Ok(cpus)
    }

    fn measure(&self, cpu: u32, count: u32) -> Result<MeasureRequest> {
        let header = Header::of::<MeasureRequest>();
        let mut request = MeasureRequest { header, cpu, count, ..MeasureRequest::default() };
        let result = self.request::<MERCURY_IOC_MEASURE, _>(&mut request);
        failure("measuring", result, &request.outcome)?;
        Ok(request)
    }

    fn fault(&self, request: FaultRequest) -> Result<u32> {
        let mut request = FaultRequest { header: Header::of::<FaultRequest>(), ..request };
        match self.request::<MERCURY_IOC_FAULT, _>(&mut request) {
            Err(Errno::NOTTY) => Err(Error::new(Exit::Failed, "this driver was built without fault points")
                .hint("only the lab's test builds have them")),
            result => failure("arming a fault", result, &NO_OUTCOME).map(|()| request.fired),
        }
    }

    fn shared(&self) -> Result<Vec<SharedCpu>> {
        let bytes = self.system()?.shared_size as usize;
        if bytes < SHARED_CPU_SIZE {
            return Ok(Vec::new());
        }
        let mapping = Mapping::new(&self.fd, bytes)?;
        Ok((0..bytes / SHARED_CPU_SIZE).map(|index| mapping.block(index)).collect())
    }
}

/// The dirty log of a disk.
#[derive(Clone, Copy, Debug)]
pub struct DiskLog<'a> {
    device: &'a Device,
    disk: &'a File,
    chunk_shift: u32,
    chunks: u64,
}

impl DiskLog<'_> {
    /// Begins the log: all later writes are in it. It ends with the device, too.
    pub fn begin(&self) -> Result<()> {
        let found = self.ask(MERCURY_DISK_LOG_BEGIN, &mut [])?;
        if found == self.chunks {
            return Ok(());
        }
        Err(Error::new(Exit::Failed, "the disk has another size than before")
            .hint("nothing was changed; try again"))
    }

    /// Returns the chunks that may have been written to since the last call, in their order.
    pub fn collect(&self) -> Result<Vec<u64>> {
        let mut map = vec![0_u64; self.chunks.div_ceil(64) as usize];
        self.ask(MERCURY_DISK_LOG_COLLECT, &mut map)?;
        let numbers = |(word, bits): (u64, u64)| {
            (0..64).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| word * 64 + bit)
        };
        Ok((0..).zip(map).filter(|(_, bits)| *bits != 0).flat_map(numbers).collect())
    }

    pub fn end(&self) -> Result<()> {
        self.ask(MERCURY_DISK_LOG_END, &mut []).map(drop)
    }

    fn ask(&self, what: u32, map: &mut [u64]) -> Result<u64> {
        let mut request = DiskLogRequest {
            header: Header::of::<DiskLogRequest>(),
            what,
            disk_fd: self.disk.as_raw_fd().cast_unsigned(),
            chunk_shift: self.chunk_shift,
            map_addr: address(map.as_mut_ptr()),
            map_words: map.len() as u64,
            ..DiskLogRequest::default()
        };
        let result = self.device.request::<MERCURY_IOC_DISK_LOG, _>(&mut request);
        failure("the dirty log of the disk", result, &request.outcome)?;
        Ok(request.chunks)
    }
}

/// Frames of a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frames {
    /// Physical addresses of the frames.
    pub phys: Vec<u64>,
    /// Contents of the frames, a page each.
    pub data: Vec<u8>,
    /// True if the pool runs low: writers will have to wait soon.
    pub hurry: bool,
}

/// The range of frames to read: from `next_phys` to before `end_phys`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// First address of the rest; all ones after the last frame.
    pub next_phys: u64,
    /// End of the range.
    pub end_phys: u64,
}

impl Cursor {
    /// Returns true if nothing is left.
    #[must_use]
    pub fn is_done(self) -> bool {
        self.next_phys == u64::MAX
    }
}

/// A machine as the driver describes it, or gets it described.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restart {
    /// Flags `MERCURY_RESTART_*`.
    pub flags: u64,
    /// Kernel address at which the machine goes on.
    pub resume_virt: u64,
    /// Physical addresses of the page with that address, and of the next page.
    pub resume_phys: [u64; 2],
    pub cpus: Vec<RestartCpu>,
    pub ranges: Vec<RestartRange>,
}

const PAGE: usize = 4096;

/// Snapshots and restores.
impl Device {
    /// Prepares a snapshot with the same arguments.
    pub fn snapshot_prepare(&self, pool_pages: u64, flags: u64) -> Result<()> {
        let header = Header::of::<SnapshotRequest>();
        let mut request = SnapshotRequest { header, flags, pool_pages, ..SnapshotRequest::default() };
        let result = self.request::<MERCURY_IOC_SNAPSHOT_PREPARE, _>(&mut request);
        failure("preparing the snapshot", result, &request.outcome)
    }

    /// Begins a snapshot; [`SnapshotRequest::restored`] tells in which machine the call returns.
    /// `swap_pages` is [`SnapshotRequest::swap_pages`].
    pub fn snapshot_begin(&self, pool_pages: u64, flags: u64, swap_pages: u64) -> Result<SnapshotRequest> {
        let header = Header::of::<SnapshotRequest>();
        let mut request =
            SnapshotRequest { header, flags, pool_pages, swap_pages, ..SnapshotRequest::default() };
        let result = self.request::<MERCURY_IOC_SNAPSHOT_BEGIN, _>(&mut request);
        failure("the snapshot", result, &request.outcome)?;
        Ok(request)
    }

    /// Lets packets pass only to and from `peers`, from the instant of the next snapshot until this
    /// is closed.
    pub fn fence(&self, peers: &[FencePeer], life: Silent) -> Result<()> {
        let mut request = FenceRequest {
            header: Header::of::<FenceRequest>(),
            flags: life.flags(),
            peers_addr: address(peers.as_ptr()),
            peers_count: peers.len() as u32,
            ..FenceRequest::default()
        };
        let result = self.request::<MERCURY_IOC_FENCE, _>(&mut request);
        failure("fencing off the network", result, &request.outcome)
    }

    /// Takes the fence away.
    pub fn fence_down(&self) -> Result<()> {
        self.change_fence("taking the fence away", MERCURY_FENCE_DOWN)
    }

    /// Ends all security associations of IPsec, and takes the fence away.
    pub fn fence_down_afresh(&self) -> Result<()> {
        self.change_fence("taking the fence away", MERCURY_FENCE_DOWN | MERCURY_FENCE_FORGET)
    }

    /// Makes the fence stay when this process ends, for any reason.
    pub fn fence_stays(&self) -> Result<()> {
        self.change_fence("keeping the fence", MERCURY_FENCE_STAYS)
    }

    fn change_fence(&self, what: &str, flags: u64) -> Result<()> {
        let mut request =
            FenceRequest { header: Header::of::<FenceRequest>(), flags, ..FenceRequest::default() };
        let result = self.request::<MERCURY_IOC_FENCE, _>(&mut request);
        failure(what, result, &request.outcome)
    }

    /// Reads up to `count` frames of the instant.
    pub fn snapshot_read(&self, cursor: &mut Cursor, count: usize) -> Result<Frames> {
        self.frames::<MERCURY_IOC_SNAPSHOT_READ>(cursor, count, 0)
    }

    /// Reads those of them that `MERCURY_READ_*` selects. The snapshot has `MERCURY_SNAPSHOT_HASH`,
    /// and each frame comes with the hypervisor's hash of the instant.
    pub fn snapshot_read_hashed(
        &self,
        cursor: &mut Cursor,
        count: usize,
        flags: u64,
    ) -> Result<(Frames, Vec<u64>)> {
        let mut hashes = vec![0; count];
        let room = address(hashes.as_mut_ptr());
        let frames = self.frames_and::<MERCURY_IOC_SNAPSHOT_READ>(cursor, count, flags, room)?;
        hashes.truncate(frames.phys.len());
        Ok((frames, hashes))
    }

    /// Reads those of them that `MERCURY_READ_*` selects.
    pub fn snapshot_read_some(&self, cursor: &mut Cursor, count: usize, flags: u64) -> Result<Frames> {
        self.frames::<MERCURY_IOC_SNAPSHOT_READ>(cursor, count, flags)
    }

    /// Reads up to `count` frames of a snapshot that is only prepared, as they are now.
    pub fn snapshot_read_present(&self, cursor: &mut Cursor, count: usize) -> Result<Frames> {
        self.frames::<MERCURY_IOC_SNAPSHOT_READ_PRESENT>(cursor, count, 0)
    }

    /// Reads those of them that `MERCURY_READ_*` selects.
    pub fn snapshot_read_present_some(
        &self,
        cursor: &mut Cursor,
        count: usize,
        flags: u64,
    ) -> Result<Frames> {
        self.frames::<MERCURY_IOC_SNAPSHOT_READ_PRESENT>(cursor, count, flags)
    }

    /// Begins a dirty log, for a snapshot that was prepared with room for one.
    pub fn log_begin(&self) -> Result<()> {
        let mut request = LogRequest { header: Header::of::<LogRequest>(), ..LogRequest::default() };
        let result = self.request::<MERCURY_IOC_LOG_BEGIN, _>(&mut request);
        failure("the dirty log", result, &request.outcome)
    }

    /// Collects the dirty log since the last call; returns the number of frames.
    pub fn log_collect(&self) -> Result<u64> {
        let mut request = LogRequest { header: Header::of::<LogRequest>(), ..LogRequest::default() };
        let result = self.request::<MERCURY_IOC_LOG_COLLECT, _>(&mut request);
        failure("the dirty log", result, &request.outcome)?;
        Ok(request.pages)
    }

    /// Returns the dirty log of a disk that is open as a whole and divided into so many chunks.
    #[must_use]
    pub fn disk_log<'a>(&'a self, disk: &'a File, chunk_shift: u32, chunks: u64) -> DiskLog<'a> {
        DiskLog { device: self, disk, chunk_shift, chunks }
    }

    fn frames<const REQUEST: u32>(&self, cursor: &mut Cursor, count: usize, flags: u64) -> Result<Frames> {
        self.frames_and::<REQUEST>(cursor, count, flags, 0)
    }

    /// Reads frames, and their hashes into `hashes_addr` unless it is 0.
    fn frames_and<const REQUEST: u32>(
        &self,
        cursor: &mut Cursor,
        count: usize,
        flags: u64,
        hashes_addr: u64,
    ) -> Result<Frames> {
        let mut frames = Frames { phys: vec![0; count], data: vec![0; count * PAGE], hurry: false };
        let mut request = SnapshotReadRequest {
            header: Header::of::<SnapshotReadRequest>(),
            cursor_phys: cursor.next_phys,
            end_phys: cursor.end_phys,
            count: count as u64,
            frames_addr: address(frames.phys.as_mut_ptr()),
            data_addr: address(frames.data.as_mut_ptr()),
            hashes_addr,
            flags,
            ..SnapshotReadRequest::default()
        };
        let result = self.request::<REQUEST, _>(&mut request);
        failure("reading memory", result, &request.outcome)?;
        cursor.next_phys = request.cursor_phys;
        frames.phys.truncate(request.count as usize);
        frames.data.truncate(request.count as usize * PAGE);
        frames.hurry = request.low != 0;
        Ok(frames)
    }

    /// Ends the snapshot; returns its costs.
    pub fn snapshot_end(&self) -> Result<SnapshotRequest> {
        let header = Header::of::<SnapshotRequest>();
        let mut request = SnapshotRequest { header, ..SnapshotRequest::default() };
        let result = self.request::<MERCURY_IOC_SNAPSHOT_END, _>(&mut request);
        failure("ending the snapshot", result, &request.outcome)?;
        Ok(request)
    }

    /// Puts the machine back to the snapshot that is kept. Returns only if that fails.
    pub fn rollback(&self) -> Result<()> {
        let header = Header::of::<SnapshotRequest>();
        let mut request = SnapshotRequest { header, ..SnapshotRequest::default() };
        let result = self.request::<MERCURY_IOC_ROLLBACK, _>(&mut request);
        failure("the rollback", result, &request.outcome)
    }

    /// Starts the watch with these acts, or stops it; returns its state.
    pub fn watch(&self, acts: u32) -> Result<WatchRequest> {
        let mut request = WatchRequest { acts, ..no_watch() };
        let result = self.request::<MERCURY_IOC_WATCH, _>(&mut request);
        failure("the watch", result, &request.outcome)?;
        Ok(request)
    }

    /// Returns the registers of a CPU, without what only an exit of an attached CPU can read. None if it is
    /// offline.
    pub fn registers(&self, cpu: u32) -> Result<Option<CpuFacts>> {
        self.facts(cpu | MERCURY_FACTS_REGISTERS)
    }

    /// Returns the state of the watch.
    pub fn watch_status(&self) -> Result<WatchRequest> {
        let mut request = no_watch();
        let result = self.request::<MERCURY_IOC_WATCH_STATUS, _>(&mut request);
        failure("reading the state of the watch", result, &request.outcome)?;
        Ok(request)
    }

    /// Writes bytes to the kernel's code or constants if the expected ones are there.
    pub fn mend(&self, address: u64, expected: &[u8], wanted: &[u8]) -> Result<()> {
        let mut request =
            MendRequest { header: Header::of::<MendRequest>(), address, ..MendRequest::default() };
        // One that is too long is refused by the driver.
        let size = expected.len().min(wanted.len());
        request.size = u32::try_from(size).unwrap_or(u32::MAX);
        let held = size.min(MEND_MAX);
        request.expected[..held].copy_from_slice(&expected[..held]);
        request.wanted[..held].copy_from_slice(&wanted[..held]);
        let result = self.request::<MERCURY_IOC_MEND, _>(&mut request);
        failure("mending the kernel's code", result, &request.outcome)
    }

    /// Has the hypervisor beneath a CPU execute a call about read-only pages. `first` is a physical address,
    /// or one of the kernel's.
    pub fn integrity(&self, cpu: u32, call: IntegrityCall, first: u64, argument: u64) -> Result<()> {
        let first = first & ((1 << MERCURY_INTEGRITY_SHIFT) - 1);
        let mut request = IntegrityRequest {
            header: Header::of::<IntegrityRequest>(),
            call: (call as u64) << MERCURY_INTEGRITY_SHIFT | first,
            argument,
            cpu,
            ..IntegrityRequest::default()
        };
        let result = self.request::<MERCURY_IOC_INTEGRITY, _>(&mut request);
        failure("making code and constants read-only", result, &request.outcome)
    }

    /// Describes the life that ended last, whose frames [`Self::snapshot_read`] reads.
    pub fn postmortem(&self) -> Result<(PostmortemRequest, Vec<EndedCpu>)> {
        let mut cpus = Vec::new();
        loop {
            let mut request = PostmortemRequest {
                header: Header::of::<PostmortemRequest>(),
                cpus_addr: address(cpus.as_mut_ptr()),
                cpus_count: cpus.len() as u32,
                ..PostmortemRequest::default()
            };
            let result = self.request::<MERCURY_IOC_POSTMORTEM, _>(&mut request);
            failure("the post-mortem", result, &request.outcome)?;
            let found = request.cpus_count as usize;
            if found <= cpus.len() {
                cpus.truncate(found);
                return Ok((request, cpus));
            }
            cpus.resize(found, EndedCpu::default());
        }
    }

    /// Gives the memory of that life back.
    pub fn postmortem_drop(&self) -> Result<()> {
        let (header, flags) = (Header::of::<PostmortemRequest>(), MERCURY_POSTMORTEM_DROP);
        let mut request = PostmortemRequest { header, flags, ..PostmortemRequest::default() };
        let result = self.request::<MERCURY_IOC_POSTMORTEM, _>(&mut request);
        failure("dropping the life that ended", result, &request.outcome)
    }

    /// Returns the description that is needed to restore the machine of the snapshot, without the
    /// contents of memory.
    pub fn snapshot_machine(&self) -> Result<Restart> {
        let (mut cpus, mut ranges) = (Vec::new(), Vec::new());
        loop {
            let mut request = RestartRequest {
                header: Header::of::<RestartRequest>(),
                cpus_addr: address(cpus.as_mut_ptr()),
                cpus_count: cpus.len() as u32,
                ranges_addr: address(ranges.as_mut_ptr()),
                ranges_count: ranges.len() as u32,
                ..RestartRequest::default()
            };
            let result = self.request::<MERCURY_IOC_SNAPSHOT_MACHINE, _>(&mut request);
            failure("describing the machine", result, &request.outcome)?;
            let (cpus_found, ranges_found) = (request.cpus_count as usize, request.ranges_count as usize);
            let fits = cpus_found <= cpus.len() && ranges_found <= ranges.len();
            cpus.resize(cpus_found, RestartCpu::default());
            ranges.resize(ranges_found, RestartRange::default());
            if fits {
                let RestartRequest { flags, resume_virt, resume_phys, .. } = request;
                return Ok(Restart { flags, resume_virt, resume_phys, cpus, ranges });
            }
        }
    }

    /// Reads a page of the firmware's memory; `None` if it is the kernel's own, or no memory.
    pub fn firmware_page(&self, page_phys: u64) -> Result<Option<Vec<u8>>> {
        let mut page = vec![0; PAGE];
        let mut request = FirmwareRequest {
            header: Header::of::<FirmwareRequest>(),
            page_phys,
            data_addr: address(page.as_mut_ptr()),
            ..FirmwareRequest::default()
        };
        let result = self.request::<MERCURY_IOC_FIRMWARE, _>(&mut request);
        if request.outcome.code == Code::BadArgument as u32 {
            return Ok(None);
        }
        failure("reading the firmware's memory", result, &request.outcome).map(|()| Some(page))
    }

    /// Prepares the restore of a machine in place of this one.
    pub fn restore_begin(&self, machine: &Restart) -> Result<()> {
        let mut request = RestartRequest {
            header: Header::of::<RestartRequest>(),
            flags: machine.flags,
            resume_virt: machine.resume_virt,
            resume_phys: machine.resume_phys,
            cpus_addr: address(machine.cpus.as_ptr()),
            cpus_count: machine.cpus.len() as u32,
            ranges_addr: address(machine.ranges.as_ptr()),
            ranges_count: machine.ranges.len() as u32,
            ..RestartRequest::default()
        };
        let result = self.request::<MERCURY_IOC_RESTORE_BEGIN, _>(&mut request);
        failure("the restore", result, &request.outcome)
    }

    /// Loads frames; `data` has a page for each entry that needs one.
    pub fn restore_load(&self, entries: &[LoadEntry], data: &[u8]) -> Result<()> {
        let wanted = entries.iter().filter(|entry| entry.source == mercury_abi::restart::MERCURY_LOAD_DATA);
        assert_eq!(wanted.count() * PAGE, data.len(), "a page for each");
        let mut request = LoadFramesRequest {
            header: Header::of::<LoadFramesRequest>(),
            entries_addr: address(entries.as_ptr()),
            count: entries.len() as u64,
            data_addr: address(data.as_ptr()),
            ..LoadFramesRequest::default()
        };
        let result = self.request::<MERCURY_IOC_RESTORE_LOAD, _>(&mut request);
        failure("loading memory", result, &request.outcome)
    }

    /// Reads back loaded frames from their places: a page for each.
    pub fn restore_read(&self, entries: &[LoadEntry]) -> Result<Vec<u8>> {
        let mut data = vec![0; entries.len() * PAGE];
        let mut request = LoadFramesRequest {
            header: Header::of::<LoadFramesRequest>(),
            entries_addr: address(entries.as_ptr()),
            count: entries.len() as u64,
            data_addr: address(data.as_mut_ptr()),
            ..LoadFramesRequest::default()
        };
        let result = self.request::<MERCURY_IOC_RESTORE_READ, _>(&mut request);
        failure("reading memory back", result, &request.outcome).map(|()| data)
    }

    /// Goes on in the machine that was loaded. Returns only if that fails.
    pub fn restore_go(&self) -> Result<()> {
        let mut request = LoadRequest { header: Header::of::<LoadRequest>(), ..LoadRequest::default() };
        let result = self.request::<MERCURY_IOC_RESTORE_GO, _>(&mut request);
        failure("going on in the image's machine", result, &request.outcome)
    }
}

/// Returns the address of a buffer as the driver takes it.
fn address<T>(pointer: *const T) -> u64 {
    pointer.expose_provenance() as u64
}

/// The hypervisor's published blocks, mapped read-only.
struct Mapping {
    base: *mut std::ffi::c_void,
    bytes: usize,
}

impl Mapping {
    fn new(fd: &OwnedFd, bytes: usize) -> Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice, to which no other pointer
        // exists.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, fd, 0) };
        base.map(|base| Self { base, bytes }).map_err(|errno| Error::system("mapping the counters", errno))
    }

    /// Copies one block while the hypervisor may write to it. Each record of the log has a sequence
    /// number that tells if it is whole, so records that changed during the copy are emptied.
    fn block(&self, index: usize) -> SharedCpu {
        assert!((index + 1) * SHARED_CPU_SIZE <= self.bytes);
        // SAFETY: inside the mapping (asserted), page-aligned, and every bit pattern is a
        // SharedCpu. Volatile, because the hypervisor writes concurrently.
        let read = || unsafe { self.base.cast::<SharedCpu>().add(index).read_volatile() };
        let mut block = read();
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        let again = read();
        for (record, later) in block.log.iter_mut().zip(&again.log) {
            if record.sequence != later.sequence {
                record.sequence = 0;
            }
        }
        if block.magic != SHARED_MAGIC {
            block.log.iter_mut().for_each(|record| record.sequence = 0);
        }
        block
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the memory that `new` mapped; no reference into it exists, because blocks
        // are copies.
        let result = unsafe { munmap(self.base, self.bytes) };
        debug_assert!(result.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_carry_the_size_of_their_structure() {
        assert_eq!(MERCURY_IOC_FACTS >> 16 & 0x3fff, size_of::<CpuFacts>() as u32);
    }

    #[test]
    fn the_drivers_reason_wins_over_the_errno() {
        let outcome = Outcome { code: Code::NoSvm as u32, cpu: 0, detail: [0; 2] };
        let error = failure("attach", Err(Errno::IO), &outcome).expect_err("refused");
        assert_eq!(error.code, Some(Code::NoSvm));
        let error = failure("attach", Err(Errno::IO), &NO_OUTCOME).expect_err("failed");
        assert_eq!(error.code, None);
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let ours = Header::of::<SystemInfo>();
        let theirs = Header { version: 99, ..ours };
        assert_eq!(same_version(&theirs, &ours).map_err(|error| error.code), Err(Some(Code::AbiMismatch)));
    }
}
