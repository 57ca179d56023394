//! Random requests for the driver: known and unknown ones, with sizes, versions, flags, counts and
//! addresses that are right, nearly right and wrong, from several threads, while CPUs attach and
//! detach. Only errors that the interface knows may come back, and no byte outside a request may
//! change.
//!
//! A seed decides each thread's requests and their order. The answers also depend on the other
//! threads.

use std::{collections::BTreeMap, fs::File, io, os::fd::AsRawFd, ptr, thread};

use mercury_abi::{
    Header, MERCURY_ABI_VERSION,
    code::Code,
    ioctl::{
        DiskLogRequest, FaultRequest, FenceRequest, FirmwareRequest, LoadFramesRequest, LoadRequest,
        LogRequest, MERCURY_FEATURE_FAULT_INJECTION, MERCURY_IOC_ATTACH, MERCURY_IOC_DETACH,
        MERCURY_IOC_DISK_LOG, MERCURY_IOC_FACTS, MERCURY_IOC_FAULT, MERCURY_IOC_FENCE, MERCURY_IOC_FIRMWARE,
        MERCURY_IOC_LOAD, MERCURY_IOC_LOG_BEGIN, MERCURY_IOC_LOG_COLLECT, MERCURY_IOC_MEASURE,
        MERCURY_IOC_POSTMORTEM, MERCURY_IOC_RESTORE_BEGIN, MERCURY_IOC_RESTORE_GO, MERCURY_IOC_RESTORE_LOAD,
        MERCURY_IOC_RESTORE_READ, MERCURY_IOC_SNAPSHOT_BEGIN, MERCURY_IOC_SNAPSHOT_END,
        MERCURY_IOC_SNAPSHOT_MACHINE, MERCURY_IOC_SNAPSHOT_PREPARE, MERCURY_IOC_SNAPSHOT_READ,
        MERCURY_IOC_SNAPSHOT_READ_PRESENT, MERCURY_IOC_STATUS, MERCURY_IOC_SYSTEM, MERCURY_IOC_UNLOAD,
        MERCURY_IOC_WATCH, MERCURY_IOC_WATCH_STATUS, MERCURY_STATE_CRASHED, MERCURY_STATE_UNLOADED,
        MeasureRequest, Outcome, PostmortemRequest, RestartRequest, SnapshotReadRequest, SnapshotRequest,
        StatusRequest, SwitchRequest, WatchRequest,
    },
};
use serde_json::json;

use crate::{Result, device, report::Report, rng::Rng, stop::Stop};

const PAGE: usize = 4096;
const CANARY: u8 = 0xA5;
/// The errors that the interface knows.
const ERRORS: [(i32, &str); 13] = [
    (libc::EINVAL, "EINVAL"),
    (libc::EFAULT, "EFAULT"),
    (libc::ENOTTY, "ENOTTY"),
    (libc::EPERM, "EPERM"),
    (libc::EACCES, "EACCES"),
    (libc::EBUSY, "EBUSY"),
    (libc::ENODEV, "ENODEV"),
    (libc::EEXIST, "EEXIST"),
    (libc::ENXIO, "ENXIO"),
    (libc::ENOMEM, "ENOMEM"),
    (libc::EOPNOTSUPP, "EOPNOTSUPP"),
    (libc::EINTR, "EINTR"),
    (libc::EIO, "EIO"),
];
const COMMANDS: [u32; 26] = [
    MERCURY_IOC_SYSTEM,
    MERCURY_IOC_FACTS,
    MERCURY_IOC_LOAD,
    MERCURY_IOC_UNLOAD,
    MERCURY_IOC_ATTACH,
    MERCURY_IOC_DETACH,
    MERCURY_IOC_STATUS,
    MERCURY_IOC_MEASURE,
    MERCURY_IOC_SNAPSHOT_PREPARE,
    MERCURY_IOC_SNAPSHOT_BEGIN,
    MERCURY_IOC_SNAPSHOT_READ,
    MERCURY_IOC_SNAPSHOT_READ_PRESENT,
    MERCURY_IOC_SNAPSHOT_END,
    MERCURY_IOC_LOG_BEGIN,
    MERCURY_IOC_LOG_COLLECT,
    MERCURY_IOC_DISK_LOG,
    MERCURY_IOC_SNAPSHOT_MACHINE,
    MERCURY_IOC_FENCE,
    MERCURY_IOC_FIRMWARE,
    MERCURY_IOC_WATCH,
    MERCURY_IOC_WATCH_STATUS,
    MERCURY_IOC_POSTMORTEM,
    MERCURY_IOC_RESTORE_BEGIN,
    MERCURY_IOC_RESTORE_LOAD,
    MERCURY_IOC_RESTORE_READ,
    MERCURY_IOC_RESTORE_GO,
];
/// The first number beyond all requests.
const NUMBERS_END: u32 = 33;

/// The requests to send.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The seed of all requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of requests of all threads together
    #[arg(long, default_value_t = 10_000)]
    iterations: u64,
    /// Number of threads
    #[arg(long, default_value_t = 4)]
    threads: u64,
}

/// Sends the requests. Leaves every CPU native and nothing loaded.
pub fn run(args: &Args, stop: &Stop, report: &mut Report) -> Result<()> {
    let control = device::open_to_control()?;
    let with_faults = device::system(&control)?.features & MERCURY_FEATURE_FAULT_INJECTION != 0;
    let parts = thread::scope(|scope| {
        let threads: Vec<_> = (0..args.threads)
            .map(|number| {
                let control = &control;
                let count = args.iterations / args.threads;
                let rng = Rng::new(args.seed.wrapping_mul(1000) + number);
                scope.spawn(move || Fuzzer::new(control, rng, with_faults)?.run(count, stop))
            })
            .collect();
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    let mut answers: BTreeMap<String, u64> = BTreeMap::new();
    for part in parts {
        let (part, counts) = part.map_err(|_| "a thread panicked")??;
        report.merge(part);
        for (name, count) in counts {
            *answers.entry(name).or_default() += count;
        }
    }
    report.fact("answers", json!(answers));
    leave(&control, report)
}

/// Detaches and unloads everything. A driver that has crashed would report it here.
fn leave(control: &File, report: &mut Report) -> Result<()> {
    let state = device::system(control)?.state;
    report.check(state != MERCURY_STATE_CRASHED, || "the hypervisor has crashed".into());
    if state != MERCURY_STATE_UNLOADED {
        device::switch(control, MERCURY_IOC_DETACH, 0, 0)?;
        let mut unload = LoadRequest { header: Header::of::<LoadRequest>(), ..LoadRequest::default() };
        device::request(control, MERCURY_IOC_UNLOAD, &mut unload)?;
    }
    Ok(())
}

/// The place of a request in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The end of a page, with nothing mapped after it.
    AtTheEdge,
    /// The edge of a page, with one half beyond it.
    OverTheEdge,
    /// A page that cannot be written to.
    ReadOnly,
    /// An address with nothing mapped.
    Nowhere(u64),
}

const NOWHERE: [u64; 8] = [
    0,
    1,
    0x10_0000,
    0x7FFF_FFFF_F000,
    0x8000_0000_0000,
    0xFFFF_8880_0000_1000,
    0xFFFF_FFFF_8100_0000,
    u64::MAX - 7,
];

struct Fuzzer<'a> {
    control: &'a File,
    reader: File,
    rng: Rng,
    memory: Memory,
    with_faults: bool,
    report: Report,
    answers: BTreeMap<String, u64>,
}

impl<'a> Fuzzer<'a> {
    fn new(control: &'a File, rng: Rng, with_faults: bool) -> Result<Self> {
        let (reader, memory) = (device::open_read_only()?, Memory::new()?);
        let (report, answers) = (Report::default(), BTreeMap::new());
        Ok(Self { control, reader, rng, memory, with_faults, report, answers })
    }

    fn run(mut self, count: u64, stop: &Stop) -> Result<(Report, BTreeMap<String, u64>)> {
        for _ in 0..count {
            if stop.is_set() {
                break;
            }
            match self.rng.below(40) {
                0 => self.open_again(),
                1 => self.map(),
                _ => self.ask(),
            }
            self.report.pass();
        }
        Ok((self.report, self.answers))
    }

    /// Opens the device again. There is one controller, and this process is it.
    fn open_again(&mut self) {
        let again = device::open_to_control();
        let busy = again.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY));
        self.report.check(busy, || format!("a second controller: {again:?}"));
        match device::open_read_only() {
            Ok(reader) => self.reader = reader,
            Err(error) => self.report.violation(format!("cannot open the device read-only: {error}")),
        }
    }

    fn map(&mut self) {
        let access = self.rng.pick(&[libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE, libc::PROT_NONE]);
        let kind = self.rng.pick(&[libc::MAP_SHARED, libc::MAP_PRIVATE]);
        let length = PAGE * self.rng.pick(&[1, 2, 3, 4, 1000]);
        let offset = (PAGE as u64 * self.rng.pick(&[0, 0, 0, 1, 2, 1 << 20])) as i64;
        let device = if self.rng.once_in(2) { self.control } else { &self.reader };
        // SAFETY: a new mapping.
        let memory = unsafe { libc::mmap(ptr::null_mut(), length, access, kind, device.as_raw_fd(), offset) };
        if memory == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            return self.answer(Err(error), "mmap");
        }
        self.report.check(access & libc::PROT_WRITE == 0, || "shared blocks were mapped writable".into());
        if access == libc::PROT_READ {
            // SAFETY: mapped readable just now; the driver maps all of it or nothing.
            unsafe { memory.cast::<u64>().read_volatile() };
        }
        // SAFETY: mapped just now.
        unsafe { libc::munmap(memory, length) };
        self.answer(Ok(()), "mmap");
    }

    fn ask(&mut self) {
        let command = self.command();
        let size = (command >> 16 & 0x3FFF) as usize;
        let place = self.place();
        let request = self.request(command, size);
        let address = self.memory.put(place, &request);
        let device = if self.rng.once_in(4) { &self.reader } else { self.control };
        // SAFETY: the address is in this thread's own pages, or nothing is there.
        let result = unsafe { device::raw_request(device, command, address) };
        if place == Place::AtTheEdge {
            let outcome = self.memory.outcome(command, size);
            self.check_outcome(command, &result, outcome);
        }
        let intact = self.memory.is_intact(place, size);
        self.report.check(intact, || format!("{command:#x} wrote before its request"));
        self.answer(result, &format!("{command:#x} at {place:x?}"));
    }

    /// Chooses a command, mostly a known one.
    fn command(&mut self) -> u32 {
        let known = self.rng.pick(&COMMANDS);
        let fault = if self.with_faults { known } else { MERCURY_IOC_FAULT };
        match self.rng.below(20) {
            0 => known ^ 1 << (16 + self.rng.below(14)),
            1 => known ^ 1 << (30 + self.rng.below(2)),
            2 => (known & !0xFF) | (NUMBERS_END + self.rng.below(200) as u32),
            3 => known ^ 1 << (8 + self.rng.below(8)),
            4 => fault,
            _ => known,
        }
    }

    fn place(&mut self) -> Place {
        match self.rng.below(12) {
            0 => Place::OverTheEdge,
            1 => Place::ReadOnly,
            2 => Place::Nowhere(self.rng.pick(&NOWHERE)),
            _ => Place::AtTheEdge,
        }
    }

    fn header(&mut self, size: usize) -> Header {
        let size = size as u32;
        match self.rng.below(16) {
            0 => Header { size: size.wrapping_sub(1), version: MERCURY_ABI_VERSION },
            1 => Header { size: self.rng.next() as u32, version: MERCURY_ABI_VERSION },
            2 => Header { size, version: self.rng.pick(&[0, MERCURY_ABI_VERSION + 1, u32::MAX]) },
            _ => Header { size, version: MERCURY_ABI_VERSION },
        }
    }

    /// Chooses an address inside a request.
    fn pointer(&mut self) -> u64 {
        match self.rng.below(4) {
            0 => self.rng.pick(&NOWHERE),
            1 => self.memory.scratch_end() - self.rng.below(64),
            _ => self.memory.scratch() + 8 * self.rng.below(16),
        }
    }

    fn count(&mut self) -> u32 {
        let random = self.rng.next() as u32;
        self.rng.pick(&[0, 1, 1, 2, 8, 128, 129, 1000, 1001, u32::MAX, random])
    }

    fn flags(&mut self) -> u64 {
        let random = self.rng.next();
        self.rng.pick(&[0, 0, 0, 0, 0, 1, 1, 2, 8, 8, 1 << 63, random])
    }

    /// Returns the request's bytes. An unknown command gets a random tail.
    fn request(&mut self, command: u32, size: usize) -> Vec<u8> {
        let header = self.header(size);
        let mut bytes = match command {
            MERCURY_IOC_LOAD | MERCURY_IOC_UNLOAD | MERCURY_IOC_RESTORE_GO => {
                bytes_of(LoadRequest { header, flags: self.flags(), ..LoadRequest::default() })
            }
            MERCURY_IOC_ATTACH | MERCURY_IOC_DETACH => bytes_of(self.switch(header)),
            MERCURY_IOC_STATUS => bytes_of(StatusRequest {
                header,
                cpus_count: self.count(),
                cpus_addr: self.pointer(),
                ..StatusRequest::default()
            }),
            MERCURY_IOC_MEASURE => bytes_of(MeasureRequest {
                header,
                cpu: self.count(),
                count: self.count(),
                ..MeasureRequest::default()
            }),
            MERCURY_IOC_SNAPSHOT_PREPARE | MERCURY_IOC_SNAPSHOT_BEGIN | MERCURY_IOC_SNAPSHOT_END => {
                let pool_pages = self.rng.pick(&[0, 1, 100, 2000, u64::MAX]);
                bytes_of(SnapshotRequest {
                    header,
                    flags: self.flags(),
                    pool_pages,
                    ..SnapshotRequest::default()
                })
            }
            MERCURY_IOC_SNAPSHOT_READ | MERCURY_IOC_SNAPSHOT_READ_PRESENT => bytes_of(SnapshotReadRequest {
                header,
                flags: self.flags(),
                cursor_phys: self.address(),
                end_phys: self.address(),
                count: u64::from(self.count()),
                frames_addr: self.pointer(),
                data_addr: self.pointer(),
                hashes_addr: self.rng.pick(&[0, 1]) * self.pointer(),
                ..SnapshotReadRequest::default()
            }),
            MERCURY_IOC_SNAPSHOT_MACHINE | MERCURY_IOC_RESTORE_BEGIN => bytes_of(self.machine(header)),
            MERCURY_IOC_RESTORE_LOAD | MERCURY_IOC_RESTORE_READ => bytes_of(LoadFramesRequest {
                header,
                entries_addr: self.pointer(),
                count: u64::from(self.count()),
                data_addr: self.pointer(),
                ..LoadFramesRequest::default()
            }),
            MERCURY_IOC_LOG_BEGIN | MERCURY_IOC_LOG_COLLECT => {
                bytes_of(LogRequest { header, pages: self.address(), ..LogRequest::default() })
            }
            MERCURY_IOC_DISK_LOG => bytes_of(DiskLogRequest {
                header,
                what: self.count(),
                disk_fd: self.rng.pick(&[0, 1, 2, 3, 4, u32::MAX]),
                chunk_shift: self.rng.pick(&[0, 16, 20, 21, u32::MAX]),
                map_addr: self.pointer(),
                map_words: self.address(),
                ..DiskLogRequest::default()
            }),
            MERCURY_IOC_FENCE => bytes_of(FenceRequest {
                header,
                flags: self.flags(),
                peers_addr: self.pointer(),
                peers_count: self.count(),
                ..FenceRequest::default()
            }),
            MERCURY_IOC_FIRMWARE => bytes_of(FirmwareRequest {
                header,
                page_phys: self.address(),
                data_addr: self.pointer(),
                ..FirmwareRequest::default()
            }),
            // A panic would end the test: no acts besides being on.
            MERCURY_IOC_WATCH | MERCURY_IOC_WATCH_STATUS => bytes_of(WatchRequest {
                header,
                flags: self.rng.pick(&[0, 0, 0, 1, u64::MAX]),
                acts: self.rng.pick(&[0, 1, 1, 2, 1 << 31]),
                tiers: 0,
                hpet_code: 0,
                perf_code: 0,
                cpus: 0,
                reserved: self.rng.pick(&[0, 0, 0, 1]),
                ticks: 0,
                alarms: 0,
                longest_ms: 0,
                message: [0; 128],
                outcome: Outcome::default(),
            }),
            MERCURY_IOC_POSTMORTEM => bytes_of(PostmortemRequest {
                header,
                flags: self.flags(),
                cpus_addr: self.pointer(),
                cpus_count: self.count(),
                ..PostmortemRequest::default()
            }),
            MERCURY_IOC_FAULT => bytes_of(FaultRequest { header, ..FaultRequest::default() }),
            _ => bytes_of([u64::from(header.size) | u64::from(header.version) << 32, self.rng.below(4)]),
        };
        let known = bytes.len();
        bytes.resize(size, 0);
        if known < size && self.rng.once_in(2) {
            self.rng.fill(&mut bytes[known..]);
        }
        bytes
    }

    /// Chooses a physical address.
    fn address(&mut self) -> u64 {
        let random = self.rng.next();
        self.rng.pick(&[0, 0, 1, 0x1000, 0x10_0000, 0x1000_0000, 1 << 52, u64::MAX, u64::MAX, random])
    }

    fn machine(&mut self, header: Header) -> RestartRequest {
        let word = self.address();
        self.memory.fill_scratch(word);
        RestartRequest {
            header,
            flags: self.flags(),
            resume_virt: self.pointer(),
            resume_phys: [self.address(), self.address()],
            cpus_addr: self.pointer(),
            ranges_addr: self.pointer(),
            cpus_count: self.count(),
            ranges_count: self.count(),
            ..RestartRequest::default()
        }
    }

    fn switch(&mut self, header: Header) -> SwitchRequest {
        let by_mask = self.rng.once_in(2);
        let mask_addr = if by_mask { self.pointer() } else { 0 };
        let mask_words = if by_mask { self.count() } else { 0 };
        let scratch_mask = self.rng.pick(&[0, 1, 2, 3, 5, u64::MAX]);
        self.memory.fill_scratch(scratch_mask);
        SwitchRequest {
            header,
            flags: self.flags(),
            mask_addr,
            mask_words,
            results_count: self.count(),
            results_addr: self.pointer(),
            ..SwitchRequest::default()
        }
    }

    /// Checks that the code exists, and that only a successful call reports success.
    fn check_outcome(&mut self, command: u32, result: &io::Result<()>, outcome: Option<Outcome>) {
        let Some(outcome) = outcome else { return };
        let code = Code::from_number(outcome.code);
        self.report.check(code.is_some(), || format!("{command:#x}: code {} does not exist", outcome.code));
        let crash = [Code::Crashed, Code::HostException, Code::HostPanic, Code::UnknownExit];
        let fine = code.is_none_or(|code| !crash.contains(&code));
        self.report.check(fine, || format!("{command:#x}: the hypervisor crashed ({code:?})"));
        let agrees = result.is_err() || outcome.code == Code::Ok as u32;
        self.report.check(agrees, || format!("{command:#x} succeeded with code {}", outcome.code));
    }

    fn answer(&mut self, result: io::Result<()>, what: &str) {
        let number = result.as_ref().err().and_then(io::Error::raw_os_error);
        let known = ERRORS.iter().find(|(error, _)| Some(*error) == number);
        let name = match (number, known) {
            (None, _) => "ok".to_owned(),
            (Some(_), Some((_, name))) => (*name).to_owned(),
            (Some(number), None) => {
                self.report.violation(format!("{what}: error {number}"));
                number.to_string()
            }
        };
        *self.answers.entry(name).or_default() += 1;
    }
}

/// Returns a structure's bytes.
fn bytes_of<T: Copy>(value: T) -> Vec<u8> {
    // SAFETY: the interface's structures have no padding and consist of integers.
    unsafe { std::slice::from_raw_parts(ptr::from_ref(&value).cast(), size_of::<T>()) }.to_vec()
}

/// A thread's own pages: one for requests with nothing mapped after it, one that cannot be written
/// to, and one for the data of requests, also with nothing mapped after it.
struct Memory(*mut u8);

const REQUESTS: usize = 0;
const READ_ONLY: usize = 2 * PAGE;
const SCRATCH: usize = 4 * PAGE;
const ALL: usize = 6 * PAGE;

impl Memory {
    fn new() -> Result<Self> {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, of which some pages are closed at once.
        unsafe {
            let memory = libc::mmap(ptr::null_mut(), ALL, access, flags, -1, 0);
            if memory == libc::MAP_FAILED {
                return Err(io::Error::last_os_error().into());
            }
            let memory = memory.cast::<u8>();
            for closed in [REQUESTS, READ_ONLY, SCRATCH] {
                libc::mprotect(memory.add(closed + PAGE).cast(), PAGE, libc::PROT_NONE);
            }
            Ok(Self(memory))
        }
    }

    fn page(&mut self, offset: usize) -> &mut [u8] {
        // SAFETY: an open page of this mapping, borrowed with `self`.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(offset), PAGE) }
    }

    fn scratch(&self) -> u64 {
        self.0 as u64 + SCRATCH as u64
    }

    fn scratch_end(&self) -> u64 {
        self.scratch() + PAGE as u64
    }

    fn fill_scratch(&mut self, word: u64) {
        for bytes in self.page(SCRATCH).chunks_exact_mut(8) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
    }

    /// Puts a request at a place. Returns its address.
    fn put(&mut self, place: Place, request: &[u8]) -> u64 {
        let size = request.len().min(PAGE);
        match place {
            Place::AtTheEdge => {
                let page = self.page(REQUESTS);
                page.fill(CANARY);
                page[PAGE - size..].copy_from_slice(&request[..size]);
                self.0 as u64 + (PAGE - size) as u64
            }
            Place::OverTheEdge => {
                let half = size / 2;
                let page = self.page(REQUESTS);
                page.fill(CANARY);
                page[PAGE - half..].copy_from_slice(&request[..half]);
                self.0 as u64 + (PAGE - half) as u64
            }
            Place::ReadOnly => {
                self.protect(libc::PROT_READ | libc::PROT_WRITE);
                self.page(READ_ONLY)[..size].copy_from_slice(&request[..size]);
                self.protect(libc::PROT_READ);
                self.0 as u64 + READ_ONLY as u64
            }
            Place::Nowhere(address) => address,
        }
    }

    fn protect(&self, access: i32) {
        // SAFETY: a page of this mapping that no reference has borrowed.
        unsafe { libc::mprotect(self.0.add(READ_ONLY).cast(), PAGE, access) };
    }

    /// Returns true if nothing was written before the request at the edge.
    fn is_intact(&mut self, place: Place, size: usize) -> bool {
        place != Place::AtTheEdge
            || self.page(REQUESTS)[..PAGE - size.min(PAGE)].iter().all(|byte| *byte == CANARY)
    }

    /// Returns the outcome in the request at the edge, for commands that have one.
    fn outcome(&mut self, command: u32, size: usize) -> Option<Outcome> {
        let offset = match command {
            MERCURY_IOC_LOAD | MERCURY_IOC_UNLOAD | MERCURY_IOC_RESTORE_GO => {
                std::mem::offset_of!(LoadRequest, outcome)
            }
            MERCURY_IOC_SNAPSHOT_PREPARE | MERCURY_IOC_SNAPSHOT_BEGIN | MERCURY_IOC_SNAPSHOT_END => {
                std::mem::offset_of!(SnapshotRequest, outcome)
            }
            MERCURY_IOC_SNAPSHOT_READ | MERCURY_IOC_SNAPSHOT_READ_PRESENT => {
                std::mem::offset_of!(SnapshotReadRequest, outcome)
            }
            MERCURY_IOC_LOG_BEGIN | MERCURY_IOC_LOG_COLLECT => std::mem::offset_of!(LogRequest, outcome),
            MERCURY_IOC_DISK_LOG => std::mem::offset_of!(DiskLogRequest, outcome),
            MERCURY_IOC_SNAPSHOT_MACHINE | MERCURY_IOC_RESTORE_BEGIN => {
                std::mem::offset_of!(RestartRequest, outcome)
            }
            MERCURY_IOC_RESTORE_LOAD | MERCURY_IOC_RESTORE_READ => {
                std::mem::offset_of!(LoadFramesRequest, outcome)
            }
            MERCURY_IOC_ATTACH | MERCURY_IOC_DETACH => std::mem::offset_of!(SwitchRequest, outcome),
            MERCURY_IOC_MEASURE => std::mem::offset_of!(MeasureRequest, outcome),
            _ => return None,
        };
        let bytes = &self.page(REQUESTS)[PAGE - size + offset..][..size_of::<Outcome>()];
        // SAFETY: any bytes are an outcome.
        Some(unsafe { bytes.as_ptr().cast::<Outcome>().read_unaligned() })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`.
        unsafe { libc::munmap(self.0.cast(), ALL) };
    }
}
