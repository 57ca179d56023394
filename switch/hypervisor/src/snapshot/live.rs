//! The snapshot of this machine: what the driver's calls ([`mercury_abi::snapshot`]) do with it.
//!
//! It lies beside the identity map, under its lock, and lives from one call to another. No CPU is trusted to come:
//! who waits for the others at the instant waits for a bounded time, and a CPU that leaves the hypervisor makes the
//! snapshot worthless, not the machine.

use core::sync::atomic::{AtomicU64, Ordering};

use mercury_abi::code::Code;
use mercury_abi::gate::OwnedRange;
use mercury_abi::restart::RestartCpu;
use mercury_abi::snapshot::{
    LogCollect, LogSetup, MAP_BITS, PAGE_LIST_MAX, PageList, RollbackReason, RollbackReport, SnapshotCall,
    SnapshotSetup, SnapshotStatus, TAKE_LIST_MAX, TakeList,
};

use super::dirty_log::{self, Budget, DirtyLog, WrittenMap};
use super::free::{FreeMap, Piece};
use super::pool::{self, FreeList, Words};
use super::rendezvous::{Arrival, Rendezvous};
use super::rollback::{self, Kept, Watch};
use super::view::Access;
use super::{Counts, Log, Memory, Outcome, Pool, Snapshot};
use crate::address::{GuestPhys, HostPhys, PAGE_SIZE};
use crate::cpu::Area;
use crate::exit::Answer;
use crate::native::direct_map;
use crate::nested::{self, Nested};
use crate::paging::format::Format;
use crate::paging::table::{PageTable, Table, TablePages};
use crate::vendor::Vendor;
use crate::x86::{Hardware, Processor};

/// [`crate::cpu::Cpu::on_snapshot`]: the tables of the snapshot.
pub const ON_SNAPSHOT: u32 = 1;
/// The tables of the log.
pub const ON_LOG: u32 = 2;
/// How much of the log one call collects: some ten microseconds.
const LOG_BUDGET: Budget = Budget { words: 4096, pages: 128 };

/// Ticks of the TSC that a CPU waits for the others: a second, or a few.
const PATIENCE: u64 = 1 << 32;

/// Where CPUs meet for the instant.
static RENDEZVOUS: Rendezvous = Rendezvous::new();
/// Root of page tables that map all of memory besides, while there may be a snapshot; 0: none.
static WIDE_TABLES: AtomicU64 = AtomicU64::new(0);
/// Ticks of the TSC that the last CPU that came was in [`enter`].
static ENTER_TICKS: AtomicU64 = AtomicU64::new(0);
#[cfg(feature = "fault-injection")]
const PAGE_WORDS: usize = PAGE_SIZE as usize / size_of::<u64>();

/// Donated pages, at their direct-map addresses.
#[derive(Debug)]
pub(crate) struct Store {
    free: FreeList,
}

/// Whether the hypervisor may write to a page itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    /// What it held is safe.
    Open,
    /// There is no page for a copy.
    Wait,
    /// It is not the system's.
    Foreign,
}

/// A snapshot, if there is one, and the pages that it may use.
#[derive(Debug)]
pub(crate) struct Live<F> {
    snapshot: Option<Snapshot<F>>,
    store: Store,
    memory_virt: u64,
    memory_count: u64,
    hashes_virt: u64,
    lasting_virt: u64,
    free_virt: u64,
    free_count: u64,
    cpus: u32,
    /// There was no page: when first in a row, and when last, in ticks of the TSC.
    starved: Option<(u64, u64)>,
    /// Takes that were told to hurry, and writers that waited.
    hurries: u64,
    waits: u64,
    /// Pages that were ever given.
    donated: u64,
    /// For a snapshot that is kept.
    keep_virt: u64,
    settle_ticks: u64,
    buses: [u64; 4],
    /// Pages that were copied at the instant, and ticks of the TSC that this took.
    lasting: u64,
    lasting_ticks: u64,
    /// Why it is not exact, if it is not.
    spoilt: Code,
    /// What is written before the instant.
    log: Option<DirtyLog<F>>,
    written_virt: u64,
    collected_virt: u64,
    map_count: u64,
    /// Why it has not everything, if it has not.
    log_spoilt: Code,
    /// How the machine was put back last.
    rollback: RollbackReport,
}

/// What is there, at its direct-map address.
pub(crate) fn page<T>(phys: HostPhys) -> *mut T {
    core::ptr::with_exposed_provenance_mut(phys.in_direct_map(direct_map()).as_u64() as usize)
}

struct Direct;

impl Words for Direct {
    fn first_word(&mut self, free: HostPhys) -> &mut u64 {
        // SAFETY: a free page of the pool: the driver mapped it for the hypervisor alone, and the lock around `Live`
        // makes this the only reference.
        unsafe { &mut *page::<u64>(free) }
    }
}

impl TablePages for Store {
    fn allocate(&mut self) -> Option<HostPhys> {
        self.free.pop(&mut Direct)
    }

    fn table(&mut self, phys: HostPhys) -> &mut Table {
        // SAFETY: a table of the pool or of the identity map, mapped for the hypervisor alone; the lock around both
        // makes this the only reference.
        unsafe { &mut *page::<Table>(phys) }
    }
}

impl Pool for Store {
    fn release(&mut self, unused: HostPhys) {
        self.free.push(&mut Direct, unused);
    }

    fn copy(&mut self, from: HostPhys, to: HostPhys) {
        // SAFETY: one is the pool's or a buffer of the driver's, the other a page of the memory that the driver has
        // mapped for the snapshot: they do not overlap. The system may write to its page meanwhile only where the
        // content does not matter any more.
        unsafe { crate::x86::copy_page(page(from), page(to)) };
    }

    fn clear(&mut self, unused: HostPhys) {
        // SAFETY: a buffer of the driver's, mapped for the hypervisor; nobody has a reference to it.
        unsafe { core::ptr::write_bytes(page::<u8>(unused), 0, PAGE_SIZE as usize) };
    }
}

impl<F> Live<F> {
    /// None.
    pub(crate) const fn new() -> Self {
        let store = Store { free: FreeList::new() };
        Self {
            snapshot: None,
            store,
            memory_virt: 0,
            memory_count: 0,
            hashes_virt: 0,
            lasting_virt: 0,
            free_virt: 0,
            free_count: 0,
            cpus: 0,
            starved: None,
            hurries: 0,
            waits: 0,
            donated: 0,
            keep_virt: 0,
            settle_ticks: 0,
            buses: [0; 4],
            lasting: 0,
            lasting_ticks: 0,
            spoilt: Code::Ok,
            log: None,
            written_virt: 0,
            collected_virt: 0,
            map_count: 0,
            log_spoilt: Code::Ok,
            rollback: RollbackReport {
                count: 0,
                reason: RollbackReason::None as u32,
                cpu: 0,
                rip_virt: 0,
                pages: 0,
                functions: 0,
                meet_ticks: 0,
                work_ticks: 0,
                compared: 0,
                different: 0,
                different_phys: 0,
            },
        }
    }

    /// What is kept.
    fn memory(&self) -> Memory<'static> {
        Memory { ranges: self.ranges(), free: self.free() }
    }

    fn free(&self) -> FreeMap<'static> {
        if self.free_count == 0 {
            return FreeMap::default();
        }
        let first = core::ptr::with_exposed_provenance::<Option<&'static Piece>>(self.free_virt as usize);
        // SAFETY: the driver keeps the array of `Begin`, and the bitmaps that it leads to, where they are until `End`, in
        // memory that it has mapped. It fills them before `Enter`; nobody looks before that. No address is 0.
        FreeMap(unsafe { core::slice::from_raw_parts(first, self.free_count as usize) })
    }

    /// One of the maps of the log.
    fn map_of_log(&self, virt: u64) -> WrittenMap<'static> {
        if self.map_count == 0 {
            return WrittenMap::default();
        }
        let first = core::ptr::with_exposed_provenance::<Option<&'static dirty_log::Piece>>(virt as usize);
        // SAFETY: the driver keeps the arrays of `LogBegin`, and the bitmaps that they lead to, where they are until `End`,
        // in memory that it has mapped. Both sides change bits by locked instructions only. No address is 0.
        WrittenMap(unsafe { core::slice::from_raw_parts(first, self.map_count as usize) })
    }

    /// The ranges that are kept.
    fn ranges(&self) -> &'static [OwnedRange] {
        if self.memory_count == 0 {
            return &[];
        }
        let first = core::ptr::with_exposed_provenance::<OwnedRange>(self.memory_virt as usize);
        // SAFETY: the driver keeps the array of `Begin` where it is, and as it is, until `End`, which forgets it.
        unsafe { core::slice::from_raw_parts(first, self.memory_count as usize) }
    }

    /// The CPUs of a snapshot that is kept.
    fn kept_cpus(&self) -> &'static [RestartCpu] {
        if self.keep_virt == 0 {
            return &[];
        }
        let first = core::ptr::with_exposed_provenance::<RestartCpu>(self.keep_virt as usize);
        // SAFETY: as for the ranges; the driver gives an entry for each CPU.
        unsafe { core::slice::from_raw_parts(first, self.cpus as usize) }
    }
}

impl<F: Format<Address = GuestPhys>> Live<F> {
    /// Whether an access beneath the snapshot can be made now. If not, it is for the identity map to answer.
    #[inline(never)]
    pub(crate) fn keeps(&mut self, address: GuestPhys, access: Access) -> bool {
        let memory = self.memory();
        let Some(snapshot) = self.snapshot.as_mut() else { return false };
        let outcome = snapshot.fault(&mut self.store, memory, address, access);
        if outcome != Outcome::Exhausted {
            self.starved = self.starved.filter(|_| outcome != Outcome::Copied);
            return matches!(outcome, Outcome::Copied | Outcome::Open);
        }
        // The system makes the same access again when it has waited, and what interrupts it goes first.
        self.starve();
        true
    }

    /// Whether an access of a CPU that is on the log's tables can be made now. If not, it is for the identity map to
    /// answer.
    pub(crate) fn logs(&mut self, address: GuestPhys, access: Access) -> bool {
        self.log_access(address, access) == Some(Outcome::Open)
    }

    #[inline(never)]
    fn log_access(&mut self, address: GuestPhys, access: Access) -> Option<Outcome> {
        let (ranges, written) = (self.ranges(), self.map_of_log(self.written_virt));
        let log = self.log.as_mut()?;
        let mut outcome = log.fault(&mut self.store, ranges, written, address, access);
        if outcome == Outcome::Exhausted {
            self.log_spoilt = Code::SnapshotPool;
            log.give_up();
            // Now nothing must be kept, and no page is needed.
            outcome = log.fault(&mut self.store, ranges, written, address, access);
        }
        Some(outcome)
    }

    /// There was no page. Not for ever.
    pub(crate) fn starve(&mut self) {
        let now = Processor.tsc();
        self.waits += 1;
        // Whoever wrote may never come again, and another one much later.
        let in_a_row = self.starved.filter(|(_, last)| now.wrapping_sub(*last) < pool::PATIENCE / 2);
        let first = in_a_row.map_or(now, |(first, _)| first);
        self.starved = Some((first, now));
        if self.keep_virt != 0 || now.wrapping_sub(first) > pool::PATIENCE {
            self.spoil(Code::SnapshotPool);
        }
    }

    /// Before a page is written from here or round the tables by a CPU that is on these ones: keeps what it held, or
    /// notes that it is written.
    pub(crate) fn touch(&mut self, address: GuestPhys, tables: u32) -> Touch {
        if tables == ON_LOG {
            let is_foreign = self.log_access(address, Access::Write) == Some(Outcome::Hidden);
            return if is_foreign { Touch::Foreign } else { Touch::Open };
        }
        let memory = self.memory();
        let Some(snapshot) = self.snapshot.as_mut() else { return Touch::Open };
        match snapshot.fault(&mut self.store, memory, address, Access::Write) {
            Outcome::Copied | Outcome::Open | Outcome::Absent => {
                self.starved = None;
                Touch::Open
            }
            Outcome::Hidden => Touch::Foreign,
            Outcome::Exhausted => {
                self.starve();
                Touch::Wait
            }
        }
    }

    /// Whether what a CPU on these tables writes still matters.
    pub(crate) fn watches(&self, tables: u32) -> bool {
        match tables {
            ON_LOG => self.log.as_ref().is_some_and(DirtyLog::is_whole),
            _ => self.is_exact(),
        }
    }

    /// Whether an address is of the memory that is kept.
    pub(crate) fn is_memory(&self, address: GuestPhys) -> bool {
        super::next_of_memory(self.ranges(), address) == Some(address)
    }

    /// Whether it still holds what memory held.
    pub(crate) fn is_exact(&self) -> bool {
        self.snapshot.as_ref().is_some_and(Snapshot::is_exact)
    }

    /// The pool.
    pub(crate) fn pages(&mut self) -> &mut Store {
        &mut self.store
    }

    /// After the identity map has changed.
    pub(crate) fn adopt(&mut self, address: GuestPhys) {
        if let Some(snapshot) = self.snapshot.as_ref() {
            snapshot.adopt(&mut self.store, address);
        }
        if let Some(log) = self.log.as_ref() {
            log.view().adopt(&mut self.store, address);
        }
    }

    /// What it takes to go back to it, if it is kept and holds everything.
    pub(super) fn kept(&self) -> Result<Kept, Code> {
        let snapshot = self.snapshot.as_ref().filter(|_| self.keep_virt != 0).ok_or(Code::NoSnapshot)?;
        if !snapshot.is_exact() {
            return Err(self.spoilt);
        }
        Ok(Kept { cpus: self.kept_cpus(), settle_ticks: self.settle_ticks, buses: self.buses })
    }

    /// Puts memory back to it, and uses it up: how many pages that took.
    pub(super) fn put_back(&mut self) -> Result<u64, Code> {
        let snapshot = self.snapshot.as_ref().ok_or(Code::NoSnapshot)?;
        let pages = snapshot.put_back(&mut self.store).ok_or(self.spoilt)?;
        self.spoil(Code::NoSnapshot);
        Ok(pages)
    }

    /// Notes how the machine was put back.
    pub(super) fn note(&mut self, report: RollbackReport) {
        let count = self.rollback.count + 1;
        self.rollback = RollbackReport { count, ..report };
        #[cfg(feature = "fault-injection")]
        self.compare_all();
    }

    /// It does not hold what memory held any more, nor has a log everything that was written.
    pub(crate) fn spoil(&mut self, because: Code) {
        if let Some(log) = self.log.as_mut().filter(|log| log.is_whole()) {
            log.give_up();
            self.log_spoilt = because;
        }
        if let Some(snapshot) = self.snapshot.as_mut().filter(|snapshot| snapshot.is_exact()) {
            snapshot.give_up();
            self.spoilt = because;
        }
    }

    /// Adds pages to the pool; leaves those in the list that are still wanted as they are.
    fn donate(&mut self, list: &mut PageList) {
        let memory = self.memory();
        let count = (list.count as usize).min(PAGE_LIST_MAX);
        let mut refused = 0;
        for slot in 0..count {
            let phys = list.pages_phys[slot];
            let wanted = |snapshot: &Snapshot<F>| {
                snapshot.is_wanted(&mut self.store, memory, GuestPhys::new(phys)) || self.keep_virt != 0
            };
            if self.snapshot.as_ref().is_some_and(wanted) {
                list.pages_phys[refused] = phys;
                refused += 1;
            } else {
                self.store.free.push(&mut Direct, HostPhys::new(phys));
                self.donated += 1;
            }
        }
        list.count = refused as u64;
    }

    /// Gives free pages back. Half of them stay: whoever writes must not wait at once. Of a snapshot that was given up
    /// nothing is needed any more.
    fn reclaim(&mut self, list: &mut PageList) {
        let room = (list.count as usize).min(PAGE_LIST_MAX) as u64;
        list.count = 0;
        let mut free = self.store.free.count() / 2;
        if let Some(lost) = self.snapshot.as_mut().filter(|snapshot| !snapshot.is_exact()) {
            lost.drop_copies(&mut self.store, room);
            free = self.store.free.count();
        }
        for slot in list.pages_phys.iter_mut().take(room.min(free) as usize) {
            let Some(page) = self.store.free.pop(&mut Direct) else { break };
            *slot = page.as_u64();
            list.count += 1;
            self.donated -= 1;
        }
    }

    /// How long whoever has just written has to wait: see [`pool::wait`]. Nobody takes one that is kept.
    pub(crate) fn brake(&mut self) -> u64 {
        let is_exact = self.snapshot.as_ref().is_some_and(Snapshot::is_exact);
        if !is_exact || self.keep_virt != 0 {
            return 0;
        }
        let wait = pool::wait(self.store.free.count(), self.donated);
        self.waits += u64::from(wait > 0);
        wait
    }

    fn begin(&mut self, base: PageTable<F>, setup: &SnapshotSetup) -> Result<(), Code> {
        if self.snapshot.is_some() {
            return Err(Code::SnapshotLive);
        }
        (self.memory_virt, self.memory_count) = (setup.memory_virt, setup.memory_count);
        (self.hashes_virt, self.lasting_virt) = (setup.hashes_virt, setup.lasting_virt);
        (self.free_virt, self.free_count) = (setup.free_virt, setup.free_count);
        (self.cpus, self.spoilt) = (setup.cpus, Code::Ok);
        (self.keep_virt, self.settle_ticks, self.buses) = (setup.keep_virt, setup.settle_ticks, setup.buses);
        let log = if setup.log != 0 { Log::Kept } else { Log::None };
        let memory = self.memory();
        let snapshot = Snapshot::new(&mut self.store, base, memory, log);
        self.snapshot = Some(snapshot.map_err(|_| Code::SnapshotPool)?);
        Ok(())
    }

    fn begin_log(&mut self, base: PageTable<F>, setup: &LogSetup) -> Result<(), Code> {
        if self.snapshot.is_some() || self.log.is_some() {
            return Err(Code::SnapshotLive);
        }
        (self.memory_virt, self.memory_count) = (setup.memory_virt, setup.memory_count);
        (self.written_virt, self.collected_virt) = (setup.written_virt, setup.collected_virt);
        (self.map_count, self.log_spoilt) = (setup.map_count, Code::Ok);
        let ranges = self.ranges();
        let log = DirtyLog::new(&mut self.store, base, ranges);
        self.log = Some(log.map_err(|_| Code::SnapshotPool)?);
        Ok(())
    }

    fn collect_log(&mut self, collect: &mut LogCollect) -> Result<(), Code> {
        let (from, to) = (self.map_of_log(self.written_virt), self.map_of_log(self.collected_virt));
        let log = self.log.as_ref().ok_or(Code::NoSnapshot)?;
        if !log.is_whole() {
            return Err(self.log_spoilt);
        }
        let cursor = GuestPhys::new(collect.next_phys);
        let (moved, next) = log.collect(&mut self.store, from, to, cursor, LOG_BUDGET);
        collect.pages += moved;
        collect.next_phys = next.map_or(u64::MAX, |next| next.as_u64());
        Ok(())
    }

    /// 1 if the pool runs low.
    fn take(&mut self, list: &mut TakeList) -> Result<u64, Code> {
        let memory = self.memory();
        let snapshot = self.snapshot.as_mut().ok_or(Code::NoSnapshot)?;
        list.taken_before = 0;
        for (number, entry) in list.entries.iter().enumerate().take((list.count as usize).min(TAKE_LIST_MAX))
        {
            if !snapshot.is_exact() {
                return Err(self.spoilt);
            }
            let (frame, to) = (GuestPhys::new(entry.frame_phys), HostPhys::new(entry.to_phys));
            if !snapshot.take(&mut self.store, memory, frame, to) {
                list.taken_before |= 1 << number;
            }
        }
        let is_low = u64::from(pool::is_low(self.store.free.count(), self.donated));
        self.hurries += is_low;
        Ok(is_low)
    }

    /// Copies what devices write all the time.
    fn copy_lasting(&mut self) {
        self.lasting = 0;
        if self.lasting_virt == 0 {
            return;
        }
        let pieces = core::ptr::with_exposed_provenance::<usize>(self.lasting_virt as usize);
        let mut first = 0;
        for range in self.ranges() {
            let end = first + range.pages as usize;
            let mut number = first;
            while number < end {
                let (piece, bit) = (number / MAP_BITS, number % MAP_BITS);
                // SAFETY: the driver's bitmaps have a bit for each page, in memory that it has mapped.
                let rest = unsafe {
                    let bits = core::ptr::with_exposed_provenance::<u64>(pieces.add(piece).read());
                    bits.add(bit / 64).read() >> (bit % 64)
                };
                if rest == 0 {
                    number = (number / 64 + 1) * 64;
                    continue;
                }
                number += rest.trailing_zeros() as usize;
                if number < end {
                    let page = (number - first) as u64;
                    self.keeps(GuestPhys::new(range.start_phys + page * PAGE_SIZE), Access::Write);
                    if self.starved.is_some() {
                        return self.spoil(Code::SnapshotPool);
                    }
                    self.lasting += 1;
                }
                number += 1;
            }
            first = end;
        }
    }

    /// Hashes every page, for who wants to prove that what is taken is what was.
    #[cfg(feature = "fault-injection")]
    fn hash_all(&self) {
        self.each_hash(|_, slot, found| *slot = found);
    }

    /// Compares every page with what it was.
    #[cfg(feature = "fault-injection")]
    fn compare_all(&mut self) {
        let report = &mut RollbackReport { compared: 0, different: 0, ..self.rollback };
        self.each_hash(|phys, slot, found| {
            report.compared += 1;
            if *slot != found {
                report.different_phys = if report.different == 0 { phys } else { report.different_phys };
                report.different += 1;
            }
        });
        self.rollback = *report;
    }

    /// Each page's address, where its hash is kept, and its hash now.
    #[cfg(feature = "fault-injection")]
    fn each_hash(&self, mut look: impl FnMut(u64, &mut u64, u64)) {
        if self.hashes_virt == 0 {
            return;
        }
        let mut hash = core::ptr::with_exposed_provenance_mut::<u64>(self.hashes_virt as usize);
        let free = self.free();
        for range in self.ranges() {
            for number in 0..range.pages {
                let phys = range.start_phys + number * PAGE_SIZE;
                let is_free = free.has(GuestPhys::new(phys), crate::address::PageSize::Size4K);
                let content = page::<u64>(HostPhys::new(phys));
                // SAFETY: memory that the driver has mapped, while nobody writes to it; the array has a word for each
                // page.
                unsafe {
                    let content = core::slice::from_raw_parts(content, PAGE_WORDS);
                    let zeros = [0; PAGE_WORDS];
                    let found = mercury_abi::snapshot::hash(if is_free { &zeros } else { content });
                    look(phys, &mut *hash, found);
                    hash = hash.add(1);
                }
            }
        }
    }

    fn status(&self) -> SnapshotStatus {
        let Some(snapshot) = self.snapshot.as_ref() else {
            return SnapshotStatus {
                free_pages: self.store.free.count(),
                rollback: self.rollback,
                ..SnapshotStatus::default()
            };
        };
        let Counts { copies, copied, taken } = snapshot.counts();
        SnapshotStatus {
            live: 1,
            exact: u32::from(snapshot.is_exact()),
            free_pages: self.store.free.count(),
            copies,
            copied,
            taken,
            spoilt: self.spoilt as u32,
            kept: u32::from(self.keep_virt != 0),
            lasting: self.lasting,
            lasting_ticks: self.lasting_ticks,
            enter_ticks: ENTER_TICKS.load(Ordering::Relaxed),
            hurries: self.hurries,
            waits: self.waits,
            rollback: self.rollback,
        }
    }
}

/// Answers [`mercury_abi::gate::Hypercall::Snapshot`]. Not a part of every exit's stack.
#[cold]
#[inline(never)]
pub fn call<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware, call: u64, argument: u64) -> Answer {
    const ENTER: u64 = SnapshotCall::Enter as u64;
    const LEAVE: u64 = SnapshotCall::Leave as u64;
    const TABLES: u64 = SnapshotCall::Tables as u64;
    const ROLLBACK: u64 = SnapshotCall::Rollback as u64;
    const HOLD: u64 = SnapshotCall::Hold as u64;
    const LOG_ENTER: u64 = SnapshotCall::LogEnter as u64;
    match call {
        ENTER => enter(area, hardware),
        LOG_ENTER => enter_log(area),
        ROLLBACK => {
            let reason = RollbackReason::from_number(argument).unwrap_or(RollbackReason::Command);
            match rollback::ask(area, hardware, reason) {
                Ok(()) => Answer::RetryFlushed,
                Err(code) => Answer::Hypercall(code, 0),
            }
        }
        HOLD => match rollback::hold(area, hardware) {
            Ok(true) => Answer::RetryFlushed,
            held => Answer::Hypercall(held.err().unwrap_or(Code::Ok), 0),
        },
        LEAVE => {
            watch(area, Watch::Off);
            area.cpu.on_snapshot = 0;
            area.cpu.is_held = 0;
            Answer::NewTables(nested::root())
        }
        TABLES => {
            WIDE_TABLES.store(argument, Ordering::Relaxed);
            Answer::Hypercall(Code::Ok, 0)
        }
        _ if WIDE_TABLES.load(Ordering::Relaxed) == 0 => Answer::Hypercall(Code::NoSnapshot, 0),
        _ => match with_memory(area, hardware, |_, _| change::<V>(call, argument)) {
            Ok(value) => Answer::Hypercall(Code::Ok, value),
            Err(code) => Answer::Hypercall(code, 0),
        },
    }
}

/// Does `work` on page tables that map the system's memory besides, if there are any: those of the CPU's exits map the
/// hypervisor's own. Predictions that user mode has trained are forgotten before: by the world switch, if the CPU came
/// from beneath a snapshot or a log.
pub(crate) fn with_memory<V: Vendor, H: Hardware, T>(
    area: &mut Area<V>,
    hardware: &mut H,
    work: impl FnOnce(&mut Area<V>, &mut H) -> T,
) -> T {
    let (own, wide) = (hardware.own_tables(), WIDE_TABLES.load(Ordering::Relaxed));
    if wide == 0 || wide == own {
        return work(area, hardware);
    }
    if area.cpu.on_snapshot == 0 {
        hardware.forget_predictions(area.cpu.barriers);
    }
    hardware.load_own_tables(wide);
    let result = work(area, hardware);
    hardware.load_own_tables(own);
    result
}

/// Has what asks for a rollback by itself come in.
fn watch<V: Vendor>(area: &mut Area<V>, watch: Watch) {
    if V::ROLLS_BACK {
        V::watch(area, watch);
    }
}

/// The argument of a call.
fn argument<T>(address: u64) -> *mut T {
    core::ptr::with_exposed_provenance_mut(address as usize)
}

fn change<V: Vendor>(call: u64, address: u64) -> Result<u64, Code> {
    const DONATE: u64 = SnapshotCall::Donate as u64;
    const RECLAIM: u64 = SnapshotCall::Reclaim as u64;
    const BEGIN: u64 = SnapshotCall::Begin as u64;
    const TAKE: u64 = SnapshotCall::Take as u64;
    const END: u64 = SnapshotCall::End as u64;
    const STATUS: u64 = SnapshotCall::Status as u64;
    const GIVE_UP: u64 = SnapshotCall::GiveUp as u64;
    const LOG_BEGIN: u64 = SnapshotCall::LogBegin as u64;
    const LOG_COLLECT: u64 = SnapshotCall::LogCollect as u64;
    let mut guard = V::tables().lock().ok_or(Code::Crashed)?;
    let nested: &mut Nested<V::Format> = guard.as_mut().ok_or(Code::NotLoaded)?;
    let base = nested.tables().ok_or(Code::NotLoaded)?;
    let live = &mut nested.live;
    // SAFETY: the driver, which is trusted as the system above is, passes the address of the call's argument in memory
    // that it has mapped for the hypervisor, and nobody else looks at it during the call. All are made of integers.
    unsafe {
        match call {
            DONATE => live.donate(&mut *argument(address)),
            RECLAIM => live.reclaim(&mut *argument(address)),
            BEGIN => {
                let setup = &*argument::<SnapshotSetup>(address);
                if setup.keep_virt != 0 && !V::ROLLS_BACK {
                    return Err(Code::RollbackUnsupported);
                }
                live.begin(base, setup)?;
                RENDEZVOUS.begin();
                rollback::begin();
            }
            LOG_BEGIN => live.begin_log(base, &*argument::<LogSetup>(address))?,
            LOG_COLLECT => live.collect_log(&mut *argument(address))?,
            TAKE => return live.take(&mut *argument(address)),
            END => {
                *live = Live { rollback: live.rollback, ..Live::new() };
                WIDE_TABLES.store(0, Ordering::Relaxed);
            }
            STATUS => argument::<SnapshotStatus>(address).write(live.status()),
            GIVE_UP => {
                let because = u32::try_from(address).ok().and_then(Code::from_number);
                live.spoil(because.unwrap_or(Code::SnapshotLost));
            }
            _ => return Err(Code::UnknownOperation),
        }
    }
    Ok(0)
}

/// The instant: when the last CPU is here, none of them is in the system, and they all go on with the new tables.
fn enter<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware) -> Answer {
    let begun = hardware.tsc();
    let refused = |code| Answer::Hypercall(code, 0);
    let Some(Wanted { root, cpus, kept }) = wanted::<V>() else { return refused(Code::NoSnapshot) };
    let arrival = RENDEZVOUS.arrive(cpus);
    let met = match arrival {
        Arrival::Last => {
            with_memory(area, hardware, |_, hardware| at_the_instant::<V>(hardware));
            RENDEZVOUS.open();
            true
        }
        Arrival::Early => RENDEZVOUS.wait(hardware, cpus, PATIENCE),
        Arrival::Late => false,
    };
    if !met {
        return refused(Code::SnapshotMissed);
    }
    area.cpu.on_snapshot = ON_SNAPSHOT;
    if kept {
        watch(area, Watch::On);
    }
    if arrival == Arrival::Last {
        ENTER_TICKS.store(hardware.tsc().wrapping_sub(begun), Ordering::Relaxed);
    }
    Answer::NewTables(root)
}

/// This CPU runs on the tables of the log, with no older translation.
fn enter_log<V: Vendor>(area: &mut Area<V>) -> Answer {
    if area.cpu.on_snapshot == ON_SNAPSHOT {
        return Answer::Hypercall(Code::SnapshotLive, 0);
    }
    let root = V::tables()
        .lock()
        .and_then(|guard| guard.as_ref().and_then(|nested| nested.live.log.as_ref().map(DirtyLog::root)));
    let Some(root) = root else { return Answer::Hypercall(Code::NoSnapshot, 0) };
    area.cpu.on_snapshot = ON_LOG;
    Answer::NewTables(root)
}

/// What is done while no CPU is in the system, by one of them.
fn at_the_instant<V: Vendor>(hardware: &mut impl Hardware) {
    let Some(mut guard) = V::tables().lock() else { return };
    let Some(nested) = guard.as_mut() else { return };
    #[cfg(feature = "fault-injection")]
    nested.live.hash_all();
    let begun = hardware.tsc();
    nested.live.copy_lasting();
    nested.live.lasting_ticks = hardware.tsc().wrapping_sub(begun);
}

/// What the CPUs that meet go on with.
struct Wanted {
    root: HostPhys,
    cpus: u32,
    kept: bool,
}

fn wanted<V: Vendor>() -> Option<Wanted> {
    let guard = V::tables().lock()?;
    let live = &guard.as_ref()?.live;
    let root = live.snapshot.as_ref()?.root();
    Some(Wanted { root, cpus: live.cpus, kept: live.keep_virt != 0 })
}

/// The snapshot cannot be kept any more; this CPU stays on its tables until the end.
#[cold]
pub fn give_up<V: Vendor>(_: &Area<V>, because: Code) {
    if let Some(mut guard) = V::tables().lock()
        && let Some(nested) = guard.as_mut()
    {
        nested.live.spoil(because);
    }
}

/// This CPU leaves the hypervisor: nobody sees what it writes.
#[cold]
pub fn lose<V: Vendor>(area: &mut Area<V>) {
    area.cpu.on_snapshot = 0;
    area.cpu.is_held = 0;
    if let Some(mut guard) = V::tables().lock()
        && let Some(nested) = guard.as_mut()
    {
        nested.live.spoil(Code::SnapshotLost);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use mercury_abi::snapshot::TakeEntry;

    use super::*;
    use crate::mtrr::Mtrrs;
    use crate::paging::format::{AmdNested, IntelExtended};
    use crate::paging::identity::{IdentityMap, Step};
    use crate::paging::plan::{LargestPage, Layout};
    use crate::paging::table::Depth;

    /// Root of the page tables that map memory, on the model of a processor.
    pub const WIDE: u64 = 0x88_8000;

    #[repr(C, align(4096))]
    #[derive(Clone)]
    pub struct Page(pub [u8; 4096]);

    /// Memory that stays. Tests' direct map begins at 0, so an address is its own frame.
    fn leaked(count: usize) -> &'static mut [Page] {
        vec![Page([0; 4096]); count].leak()
    }

    pub fn phys(page: &Page) -> u64 {
        core::ptr::from_ref(page).expose_provenance() as u64
    }

    fn list(pages: &[Page]) -> PageList {
        let mut list = PageList { count: pages.len() as u64, pages_phys: [0; PAGE_LIST_MAX] };
        list.pages_phys.iter_mut().zip(pages).for_each(|(slot, page)| *slot = phys(page));
        list
    }

    /// With a memory of eight pages, filled with their numbers.
    pub struct Machine<F> {
        pub live: Live<F>,
        base: PageTable<F>,
        pub memory: &'static mut [Page],
        buffer: &'static mut [Page],
        setup: SnapshotSetup,
    }

    impl<F: Format<Address = GuestPhys>> Machine<F> {
        pub fn new(pool: usize) -> Self {
            let (memory, buffer) = (leaked(8), leaked(1));
            memory.iter_mut().zip(1..).for_each(|(page, number)| page.0.fill(number));
            let mut live = Live::<F>::new();
            live.donate(&mut list(leaked(64)));
            let layout = Layout {
                physical_bits: 48,
                depth: Depth::Four,
                largest: LargestPage::OneGibibyte,
                eager_end: GuestPhys::new(1 << 32),
                complete_pages: 0,
                zero_page: HostPhys::new(0x1000),
            };
            let mut map = IdentityMap::new(layout, Mtrrs::from_registers(0, [0; 11], &[], 48, None));
            assert_eq!(map.build_step(&mut live.store, &[], 1000), Step::Done);
            for page in memory.iter() {
                assert!(map.fill(&mut live.store, GuestPhys::new(phys(page))).is_ok());
            }
            let base = map.tables().expect("tables");
            // The identity map has what it needs; the snapshot gets its own.
            live.store = Store { free: FreeList::new() };
            live.donate(&mut list(leaked(pool)));
            let range = OwnedRange { start_phys: phys(&memory[0]), pages: memory.len() as u64 };
            let ranges: &[OwnedRange] = vec![range].leak();
            let memory_virt = ranges.as_ptr().expose_provenance() as u64;
            let setup = SnapshotSetup {
                memory_virt,
                memory_count: 1,
                hashes_virt: 0,
                lasting_virt: 0,
                cpus: 1,
                log: 0,
                ..SnapshotSetup::default()
            };
            Self { live, base, memory, buffer, setup }
        }

        pub fn begin(&mut self) -> Result<(), Code> {
            self.live.begin(self.base, &self.setup)
        }

        /// A log of writes: its two maps.
        pub fn begin_log(&mut self) -> Result<(), Code> {
            let pages = self.memory.iter().map(|page| (phys(page) / PAGE_SIZE) as usize / MAP_BITS);
            let map = || -> &'static [Option<&'static dirty_log::Piece>] {
                let mut map = vec![None; pages.clone().max().unwrap_or(0) + 1];
                for piece in pages.clone() {
                    map[piece].get_or_insert_with(|| {
                        &*Box::leak(Box::new([const { AtomicU64::new(0) }; MAP_BITS / 64]))
                    });
                }
                map.leak()
            };
            let (written, collected) = (map(), map());
            let setup = LogSetup {
                memory_virt: self.setup.memory_virt,
                memory_count: self.setup.memory_count,
                written_virt: written.as_ptr().expose_provenance() as u64,
                collected_virt: collected.as_ptr().expose_provenance() as u64,
                map_count: written.len() as u64,
            };
            self.live.begin_log(self.base, &setup)
        }

        /// Which pages the log has had since the last time.
        pub fn collect(&mut self) -> Result<Vec<usize>, Code> {
            // One call looks at many more pages than there are.
            let mut collect = LogCollect { next_phys: phys(&self.memory[0]), ..LogCollect::default() };
            self.live.collect_log(&mut collect)?;
            let collected = self.live.map_of_log(self.live.collected_virt);
            let take = |page: &Page| {
                let number = (phys(page) / PAGE_SIZE) as usize;
                let piece = collected.0[number / MAP_BITS].expect("a piece");
                let bit = 1 << (number % 64);
                piece[number % MAP_BITS / 64].fetch_and(!bit, Ordering::Relaxed) & bit != 0
            };
            Ok((0..self.memory.len()).filter(|page| take(&self.memory[*page])).collect())
        }

        /// As a guest: the first write to a page faults.
        fn write(&mut self, page: usize, value: u8) {
            assert!(self.live.keeps(GuestPhys::new(phys(&self.memory[page])), Access::Write));
            self.memory[page].0.fill(value);
        }

        /// What a page held at the instant.
        pub fn taken(&mut self, page: usize) -> Option<Page> {
            self.take(page).expect("a snapshot").map(|_| self.buffer[0].clone())
        }

        fn take(&mut self, page: usize) -> Result<Option<u8>, Code> {
            let entry = TakeEntry { frame_phys: phys(&self.memory[page]), to_phys: phys(&self.buffer[0]) };
            let mut list = TakeList { count: 1, ..TakeList::default() };
            list.entries[0] = entry;
            self.live.take(&mut list)?;
            Ok((list.taken_before == 0).then_some(self.buffer[0].0[4095]))
        }
    }

    fn what_was<F: Format<Address = GuestPhys>>() {
        let mut machine = Machine::<F>::new(64);
        assert_eq!(machine.take(0), Err(Code::NoSnapshot));
        assert_eq!(machine.begin(), Ok(()));
        assert_eq!(machine.begin(), Err(Code::SnapshotLive));
        machine.write(3, 0xEE);
        machine.write(3, 0xFF);
        assert_eq!((machine.live.status().copies, machine.live.status().exact), (1, 1));
        for page in 0..8 {
            assert_eq!(machine.take(page), Ok(Some(page as u8 + 1)));
            assert_eq!(machine.take(page), Ok(None), "only once");
            machine.write(page, 0);
        }
        let status = machine.live.status();
        assert_eq!((status.copies, status.copied, status.taken), (0, 1, 8));
    }

    #[test]
    fn what_is_taken_is_what_was() {
        what_was::<AmdNested>();
        what_was::<IntelExtended>();
    }

    /// The machine runs on without its snapshot, and whoever asks is told why.
    #[test]
    fn a_pool_that_is_too_small_spoils_the_snapshot() {
        let mut machine = Machine::<AmdNested>::new(1);
        assert_eq!(machine.begin(), Err(Code::SnapshotPool));
        let mut machine = Machine::<AmdNested>::new(2);
        assert_eq!(machine.begin(), Ok(()));
        // It is not given up at once: somebody may be about to make it larger.
        for _ in 0..256 {
            machine.write(5, 6);
            assert_eq!(machine.live.status().exact, 1);
        }
        // One that comes much later is the first again.
        let ago = |ticks| Processor.tsc() - ticks;
        machine.live.starved = Some((ago(4 * pool::PATIENCE), ago(3 * pool::PATIENCE)));
        machine.write(5, 6);
        assert_eq!(machine.live.status().exact, 1);
        machine.live.starved = Some((ago(2 * pool::PATIENCE), ago(0)));
        machine.write(5, 1);
        assert_eq!(machine.live.status().exact, 0);
        assert_eq!(machine.take(0), Err(Code::SnapshotPool));
        machine.write(6, 1);
    }

    /// Memory that has been taken can be used for the pool; what is still wanted, or kept to go back to, cannot.
    #[test]
    fn a_pool_grows_by_what_was_taken() {
        let mut machine = Machine::<AmdNested>::new(64);
        assert_eq!(machine.begin(), Ok(()));
        assert_eq!(machine.take(0), Ok(Some(1)));
        let free = machine.live.status().free_pages;
        let mut offer = list(&machine.memory[..2]);
        machine.live.donate(&mut offer);
        assert_eq!((offer.count, offer.pages_phys[0]), (1, phys(&machine.memory[1])));
        assert_eq!(machine.live.status().free_pages, free + 1);
        // The page that came last goes first.
        machine.write(2, 0xEE);
        assert_eq!(machine.take(2), Ok(Some(3)));
        assert_eq!(machine.take(1), Ok(Some(2)));
        machine.live.keep_virt = 1;
        machine.live.donate(&mut offer);
        assert_eq!(offer.count, 1);
    }

    #[test]
    fn a_pool_gives_half_of_what_is_free() {
        let mut machine = Machine::<AmdNested>::new(64);
        let mut list = list(&[]);
        for left in [32, 16, 8] {
            list.count = PAGE_LIST_MAX as u64;
            machine.live.reclaim(&mut list);
            assert_eq!(
                (list.count, machine.live.store.free.count(), machine.live.donated),
                (left, left, left + 64)
            );
        }
        list.count = 1;
        machine.live.reclaim(&mut list);
        assert_eq!(list.count, 1);
    }

    /// What it has copied is of no use to anybody; what is written then needs no page.
    #[test]
    fn a_snapshot_that_was_given_up_gives_all_of_its_pool() {
        let mut machine = Machine::<AmdNested>::new(64);
        assert_eq!(machine.begin(), Ok(()));
        (0..5).for_each(|page| machine.write(page, 0xEE));
        let free = machine.live.status().free_pages;
        machine.live.spoil(Code::SnapshotPool);
        let mut list = list(&[]);
        for expected in [3, free + 2] {
            list.count = expected;
            machine.live.reclaim(&mut list);
            assert_eq!(list.count, expected);
            let given = &list.pages_phys[..expected as usize];
            assert!(machine.memory.iter().all(|page| !given.contains(&phys(page))));
        }
        assert_eq!((machine.live.status().copies, machine.live.status().free_pages), (0, 0));
        list.count = 9;
        machine.live.reclaim(&mut list);
        assert_eq!(list.count, 0);
        (0..8).for_each(|page| machine.write(page, 0xFF));
    }

    /// Writers wait then, and whoever takes the snapshot knows.
    #[test]
    fn a_pool_that_runs_low_is_told_of() {
        let mut machine = Machine::<AmdNested>::new(64);
        assert_eq!(machine.begin(), Ok(()));
        machine.write(2, 0);
        let mut none = TakeList::default();
        assert_eq!((machine.live.take(&mut none), machine.live.brake()), (Ok(0), 0));
        machine.live.donated *= 100;
        assert_eq!(machine.live.take(&mut none), Ok(1));
        assert_eq!(
            (machine.live.status().hurries, machine.live.status().waits),
            (1, 0),
            "who takes hurries first"
        );
        assert!(machine.live.brake() > 0);
        assert_eq!(machine.live.status().waits, 1);
        machine.live.keep_virt = 1;
        assert_eq!(machine.live.brake(), 0, "nobody takes it");
        machine.live.keep_virt = 0;
        machine.live.spoil(Code::SnapshotLost);
        assert_eq!(machine.live.brake(), 0, "nobody waits for nothing");
        assert_eq!(machine.live.status().waits, 1);
    }

    /// What was written is what it was again; then the snapshot is used up.
    fn put_back<F: Format<Address = GuestPhys>>() {
        let mut machine = Machine::<F>::new(64);
        assert_eq!(machine.live.put_back(), Err(Code::NoSnapshot));
        assert_eq!(machine.begin(), Ok(()));
        assert_eq!(machine.live.kept().map(|_| ()), Err(Code::NoSnapshot), "it is to be taken");
        let cpus: &[RestartCpu] = vec![RestartCpu { cpu: 3, ..RestartCpu::default() }].leak();
        machine.live.keep_virt = cpus.as_ptr().expose_provenance() as u64;
        assert_eq!(machine.live.kept().map(|kept| kept.cpus), Ok(cpus));
        machine.write(2, 0xEE);
        machine.write(7, 0xEE);
        assert_eq!(machine.live.put_back(), Ok(2));
        let content: Vec<u8> = machine.memory.iter().map(|page| page.0[4095]).collect();
        assert_eq!(content, [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(machine.live.put_back(), Err(Code::NoSnapshot));
        assert_eq!(machine.live.kept().map(|_| ()), Err(Code::NoSnapshot));
        machine.write(2, 0xFF);
    }

    #[test]
    fn what_was_written_is_put_back() {
        put_back::<AmdNested>();
        put_back::<IntelExtended>();
    }

    /// Half of the machine put back would be worse than none of it.
    #[test]
    fn what_is_not_exact_is_not_put_back() {
        let mut machine = Machine::<AmdNested>::new(64);
        assert_eq!(machine.begin(), Ok(()));
        machine.write(2, 0xEE);
        machine.live.spoil(Code::SnapshotPool);
        assert_eq!(machine.live.put_back(), Err(Code::SnapshotPool));
        assert_eq!(machine.memory[2].0[0], 0xEE);
    }

    /// What devices have for good is copied before anybody writes.
    #[test]
    fn what_lasts_is_copied_at_the_instant() {
        let mut machine = Machine::<AmdNested>::new(64);
        let bits: &[u64] = vec![0b1001_0010_u64, u64::MAX].leak();
        let pieces: &[u64] = vec![bits.as_ptr().expose_provenance() as u64].leak();
        machine.setup.lasting_virt = pieces.as_ptr().expose_provenance() as u64;
        assert_eq!(machine.begin(), Ok(()));
        machine.live.copy_lasting();
        assert_eq!(machine.live.status().copies, 3, "and nothing behind the last page");
        assert_eq!(machine.live.status().lasting, 3);
        machine.memory.iter_mut().for_each(|page| page.0.fill(0xEE));
        for page in [1, 4, 7] {
            assert_eq!(machine.take(page), Ok(Some(page as u8 + 1)));
        }
        assert_eq!(machine.take(0), Ok(Some(0xEE)), "a device's write that nobody was told of");
    }

    #[test]
    fn a_cpu_that_left_spoils_the_snapshot() {
        let mut machine = Machine::<IntelExtended>::new(64);
        assert_eq!(machine.begin(), Ok(()));
        machine.live.spoil(Code::SnapshotLost);
        assert_eq!(machine.take(0), Err(Code::SnapshotLost));
    }
}
