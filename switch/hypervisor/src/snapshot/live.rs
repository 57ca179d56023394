//! The snapshot and the dirty log of this machine. Their state lies beside the identity map, under the
//! map's lock, and lives from one call of the driver to the next.
//!
//! A snapshot that cannot be kept becomes invalid, and the machine runs on.

use mercury_abi::code::Code;
use mercury_abi::restart::RestartCpu;
use mercury_abi::snapshot::{
    LogCollect, LogSetup, PAGE_LIST_MAX, PageList, READ_LIST_MAX, ReadList, RollbackReason, RollbackReport,
    SnapshotSetup, SnapshotStatus,
};

use super::frames::FrameMap;
#[cfg(feature = "fault-injection")]
use super::hashes::Hashes;
use super::instant::{Costs, Instant};
use super::ledger::Ledger;
use super::lives::SHED;
use super::recording::Recording;
use super::rollback::{self, DEATHS, Death, Target};
use super::view::Access;
use super::{Counts, Memory, Outcome, Pool, Snapshot, Tracking};
use crate::address::{Address, GuestPhys, HostPhys, PageSize};
use crate::argument::array;
use crate::cpu::Area;
use crate::paging::format::Format;
use crate::paging::table::PageTable;
use crate::vendor::Vendor;

/// [`crate::cpu::Cpu::on_snapshot`]: the guest runs on the tables of the snapshot.
pub const ON_SNAPSHOT: u32 = 1;
/// [`crate::cpu::Cpu::on_snapshot`]: the guest runs on the tables of the dirty log.
pub const ON_LOG: u32 = 2;

/// Answer to a write that the hypervisor is about to make to a page of the system, or to let through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WritePermit {
    /// The page can be written: its content is copied, or the dirty log has the page.
    Granted,
    /// There is no free page for a copy. The CPU tries again later.
    Wait,
    /// The page is not the system's.
    Foreign,
}

/// The snapshot, the dirty log, and the pool that both use.
#[derive(Debug)]
pub(crate) struct Live<F> {
    /// The memory that the snapshot keeps, or of which the dirty log records writes.
    pub(super) memory: Memory<'static>,
    pub(super) ledger: Ledger,
    pub(super) snapshot: Option<Snapshot<F>>,
    /// Reason that the snapshot is invalid; `Ok` while it holds the instant.
    invalid: Code,
    pub(super) instant: Instant,
    /// Target of a rollback. A snapshot without one is read by the driver.
    pub(super) target: Option<Target>,
    pub(super) recording: Option<Recording<F>>,
    /// Pages of the pool that the driver has got back in this life, if the machine may go back.
    returned: Option<FrameMap>,
    /// The last deaths of this machine, since the hypervisor was loaded.
    deaths: [Death; DEATHS],
    /// Report of the last rollback.
    pub(super) report: RollbackReport,
    #[cfg(feature = "fault-injection")]
    pub(super) hashes: Hashes,
}

impl<F> Live<F> {
    /// Returns the state without a snapshot, a dirty log and a pool.
    pub(crate) const fn new() -> Self {
        Self {
            memory: Memory::NONE,
            ledger: Ledger::new(),
            snapshot: None,
            invalid: Code::Ok,
            instant: Instant::new(),
            target: None,
            recording: None,
            returned: None,
            deaths: [(0, 0); DEATHS],
            report: RollbackReport {
                count: 0,
                reason: RollbackReason::None as u32,
                cpu: 0,
                rip_virt: 0,
                pages: 0,
                functions: 0,
                rendezvous_ticks: 0,
                work_ticks: 0,
                compared: 0,
                different: 0,
                different_phys: 0,
                lived_ticks: 0,
                dead_hash: 0,
                same: 0,
            },
            #[cfg(feature = "fault-injection")]
            hashes: Hashes::new(),
        }
    }

    /// Forgets everything but the report of the last rollback and the last deaths: the pool is the driver's
    /// again. A snapshot of a machine that has died of the same again and again is no beginning.
    #[inline(never)]
    pub(super) fn end(&mut self) {
        *self = Self { report: self.report, deaths: self.deaths, ..Self::new() };
    }
}

/// Calls of the driver. They are not inlined into one another, so that the image stays small.
impl<F: Format<Address = GuestPhys>> Live<F> {
    /// Prepares a snapshot over the identity map's tables.
    #[inline(never)]
    pub(super) fn begin(&mut self, base: PageTable<F>, setup: &SnapshotSetup) -> Result<(), Code> {
        if self.snapshot.is_some() {
            return Err(Code::SnapshotLive);
        }
        // SAFETY: the driver keeps the arrays of `Begin`, and the bitmaps that one leads to, where they are
        // until `End`, in memory that it has mapped. It fills the bitmaps before `Enter`, and nothing reads
        // them before. No address in an array is 0.
        let (memory, cpus): (_, &[RestartCpu]) = unsafe {
            (
                Memory::of(setup.memory_virt, setup.memory_count, setup.free_virt, setup.free_count)?,
                array(setup.keep_virt, setup.cpus.into())?,
            )
        };
        let pages = memory.pages();
        self.memory = memory;
        self.instant = Instant::of(setup, pages)?;
        self.target = (setup.keep_virt != 0).then_some(Target {
            root: HostPhys::new(0),
            once: setup.once != 0,
            ended_virt: setup.ended_virt,
            repeat_ticks: setup.repeat_ticks,
            cpus,
            settle_ticks: setup.settle_ticks,
            buses: setup.buses,
        });
        #[cfg(feature = "fault-injection")]
        {
            self.hashes = Hashes::of(setup.hashes_virt, pages)?;
        }
        self.invalid = Code::Ok;
        let tracking = if setup.log != 0 { Tracking::On } else { Tracking::Off };
        let snapshot = Snapshot::new(&mut self.ledger, base, memory, tracking);
        self.snapshot = Some(snapshot.map_err(|_| Code::SnapshotPool)?);
        Ok(())
    }

    /// Prepares a dirty log over the identity map's tables.
    #[inline(never)]
    pub(super) fn begin_log(&mut self, base: PageTable<F>, setup: &LogSetup) -> Result<(), Code> {
        if self.snapshot.is_some() || self.recording.is_some() {
            return Err(Code::SnapshotLive);
        }
        // SAFETY: as in `begin`, for the array of `LogBegin`.
        self.memory = unsafe { Memory::of(setup.memory_virt, setup.memory_count, 0, 0) }?;
        self.recording = Some(Recording::begin(&mut self.ledger, base, self.memory.ranges, setup)?);
        Ok(())
    }

    /// Collects part of the dirty log.
    #[inline(never)]
    pub(super) fn collect_log(&mut self, collect: &mut LogCollect) -> Result<(), Code> {
        let recording = self.recording.as_ref().ok_or(Code::NoSnapshot)?;
        recording.collect(&mut self.ledger, collect)
    }

    /// Adds pages to the pool. Pages whose content the snapshot still needs stay in the list.
    #[inline(never)]
    pub(super) fn donate(&mut self, list: &mut PageList) {
        let count = (list.count as usize).min(PAGE_LIST_MAX);
        let mut refused = 0;
        for slot in 0..count {
            let phys = list.pages_phys[slot];
            let is_wanted = |snapshot: &Snapshot<F>| {
                snapshot.is_wanted(&mut self.ledger, self.memory, GuestPhys::new(phys))
                    || self.target.is_some()
            };
            if self.snapshot.as_ref().is_some_and(is_wanted) {
                list.pages_phys[refused] = phys;
                refused += 1;
            } else {
                self.ledger.donate(HostPhys::new(phys));
            }
        }
        list.count = refused as u64;
    }

    /// Gives free pages back to the driver. Half of them stay, so that a writer need not wait at once. An
    /// invalid snapshot needs none any more.
    #[inline(never)]
    pub(super) fn reclaim(&mut self, list: &mut PageList) {
        let room = (list.count as usize).min(PAGE_LIST_MAX) as u64;
        list.count = 0;
        let mut free = self.ledger.free_pages() / 2;
        if let Some(snapshot) = self.snapshot.as_mut() {
            if free < room && snapshot.shed_dead(&mut self.ledger, room) {
                free = self.ledger.free_pages() / 2;
            }
            if !snapshot.is_exact() {
                snapshot.drop_copies(&mut self.ledger, room);
                free = self.ledger.free_pages();
            }
        }
        for slot in list.pages_phys.iter_mut().take(room.min(free) as usize) {
            let Some(page) = self.ledger.reclaim() else { break };
            if !self.note_returned(page) {
                self.ledger.donate(page);
                break;
            }
            *slot = page.as_u64();
            list.count += 1;
        }
    }

    /// Reads frames as they were at the instant. Returns true if the pool runs low.
    #[inline(never)]
    pub(super) fn read(&mut self, list: &mut ReadList) -> Result<bool, Code> {
        let snapshot = self.snapshot.as_mut().ok_or(Code::NoSnapshot)?;
        list.read_before = 0;
        let count = (list.count as usize).min(READ_LIST_MAX);
        for (number, entry) in list.entries.iter().enumerate().take(count) {
            if !snapshot.is_exact() {
                return Err(self.invalid);
            }
            let (frame, to) = (GuestPhys::new(entry.frame_phys), HostPhys::new(entry.to_phys));
            if !snapshot.read(&mut self.ledger, self.memory, frame, to) {
                list.read_before |= 1 << number;
            }
        }
        Ok(self.ledger.tells_to_hurry())
    }

    /// Reads frames as the life had them that ended last.
    #[inline(never)]
    pub(super) fn read_dead(&mut self, list: &mut ReadList) -> Result<(), Code> {
        let snapshot = self.snapshot.as_ref().filter(|_| self.target.is_some()).ok_or(Code::NoSnapshot)?;
        list.read_before = 0;
        for entry in list.entries.iter().take(list.count as usize) {
            let frame = GuestPhys::new(entry.frame_phys);
            let content = snapshot.dead_content(&mut self.ledger, frame).ok_or(Code::NoPostMortem)?;
            self.ledger.copy(content, HostPhys::new(entry.to_phys));
        }
        Ok(())
    }

    /// Gives the memory of that life back.
    pub(super) fn drop_dead(&mut self) {
        if let Some(snapshot) = self.snapshot.as_mut() {
            snapshot.drop_dead(&mut self.ledger);
        }
    }

    /// Returns what the snapshot costs, and how the last rollback went.
    #[inline(never)]
    pub(super) fn status(&self) -> SnapshotStatus {
        let free_pages = self.ledger.free_pages();
        let Some(snapshot) = self.snapshot.as_ref() else {
            return SnapshotStatus { free_pages, rollback: self.report, ..SnapshotStatus::default() };
        };
        let Counts { copies, copied, read, dead } = snapshot.counts();
        let Costs { enter_ticks, persistent_pages, persistent_ticks } = self.instant.costs();
        let (hurries, waits) = self.ledger.hurries_and_waits();
        SnapshotStatus {
            live: 1,
            exact: u32::from(snapshot.is_exact()),
            free_pages,
            copies,
            copied,
            taken: read,
            invalid_because: self.invalid as u32,
            kept: u32::from(self.target.is_some()),
            dead: u32::from(snapshot.has_dead()),
            reserved: 0,
            dead_pages: dead,
            persistent_pages,
            persistent_ticks,
            enter_ticks,
            hurries,
            waits,
            rollback: self.report,
        }
    }
}

/// Faults and writes of CPUs that run on the tables of the snapshot or of the dirty log.
impl<F: Format<Address = GuestPhys>> Live<F> {
    /// Returns true if the snapshot lets an access pass now. If not, the identity map has to answer it.
    #[inline(never)]
    pub(crate) fn permit_on_snapshot(&mut self, address: GuestPhys, access: Access) -> bool {
        let Some(snapshot) = self.snapshot.as_mut() else { return false };
        match snapshot.fault(&mut self.ledger, self.memory, address, access) {
            Outcome::Copied => self.ledger.feed(),
            Outcome::Open => {}
            Outcome::Hidden | Outcome::Absent => return false,
            // The CPU makes the same access again when it has waited. Whatever interrupts the CPU goes first.
            Outcome::Exhausted => self.starve(),
        }
        true
    }

    /// Returns true if the dirty log lets an access pass now. If not, the identity map has to answer it.
    pub(crate) fn permit_on_log(&mut self, address: GuestPhys, access: Access) -> bool {
        self.log_access(address, access) == Some(Outcome::Open)
    }

    #[inline(never)]
    fn log_access(&mut self, address: GuestPhys, access: Access) -> Option<Outcome> {
        let recording = self.recording.as_mut()?;
        Some(recording.fault(&mut self.ledger, self.memory.ranges, address, access))
    }

    /// Prepares a write to a page that the hypervisor makes itself, or that passes round the tables.
    /// `tables` are those of the CPU: [`crate::cpu::Cpu::on_snapshot`].
    pub(crate) fn permit_write(&mut self, address: GuestPhys, tables: u32) -> WritePermit {
        if tables == ON_LOG {
            let is_foreign = self.log_access(address, Access::Write) == Some(Outcome::Hidden);
            return if is_foreign { WritePermit::Foreign } else { WritePermit::Granted };
        }
        let Some(snapshot) = self.snapshot.as_mut() else { return WritePermit::Granted };
        match snapshot.fault(&mut self.ledger, self.memory, address, Access::Write) {
            Outcome::Copied | Outcome::Open | Outcome::Absent => {
                self.ledger.feed();
                WritePermit::Granted
            }
            Outcome::Hidden => WritePermit::Foreign,
            Outcome::Exhausted => {
                self.starve();
                WritePermit::Wait
            }
        }
    }

    /// Notes that the pool was empty. The dead life gives way first. Then the snapshot becomes invalid if
    /// writers have waited too long, or if the machine is to be put back to it: then the driver reads no
    /// frame, and no copy becomes free.
    pub(crate) fn starve(&mut self) {
        if self.snapshot.as_mut().is_some_and(|snapshot| snapshot.shed_dead(&mut self.ledger, SHED)) {
            return;
        }
        if self.ledger.starve() || self.target.is_some() {
            self.invalidate(Code::SnapshotPool);
        }
    }

    /// Returns the TSC ticks for which a CPU that has just written has to wait, so that the reader keeps up.
    pub(crate) fn throttle(&mut self) -> u64 {
        if !self.is_exact() || self.target.is_some() { 0 } else { self.ledger.throttle() }
    }

    /// Takes over a change of the identity map at an address.
    pub(crate) fn adopt(&mut self, address: GuestPhys) {
        if let Some(snapshot) = self.snapshot.as_ref() {
            snapshot.adopt(&mut self.ledger, address);
        }
        if let Some(recording) = self.recording.as_ref() {
            recording.adopt(&mut self.ledger, address);
        }
    }

    /// Returns true if writes of a CPU on these tables still have to be seen.
    pub(crate) fn watches(&self, tables: u32) -> bool {
        match tables {
            ON_LOG => self.recording.as_ref().is_some_and(Recording::is_complete),
            _ => self.is_exact(),
        }
    }

    /// Returns true if an address lies in the memory that the snapshot keeps.
    pub(crate) fn is_memory(&self, address: GuestPhys) -> bool {
        super::next_of_memory(self.memory.ranges, address) == Some(address)
    }

    /// Returns true if the snapshot holds all that memory held at the instant.
    pub(crate) fn is_exact(&self) -> bool {
        self.snapshot.as_ref().is_some_and(Snapshot::is_exact)
    }

    /// Returns the pool, for tables of nested guests.
    pub(crate) const fn pool(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    /// Returns the host-physical root of the dirty log's tables.
    pub(super) fn log_root(&self) -> Option<HostPhys> {
        self.recording.as_ref().map(Recording::root)
    }

    /// Makes the snapshot invalid and the dirty log incomplete. The first reason stays.
    pub(crate) fn invalidate(&mut self, because: Code) {
        if let Some(recording) = self.recording.as_mut() {
            recording.invalidate(because);
        }
        if let Some(snapshot) = self.snapshot.as_mut().filter(|snapshot| snapshot.is_exact()) {
            snapshot.invalidate();
            self.invalid = because;
        }
    }
}

/// Rollbacks to the snapshot.
impl<F: Format<Address = GuestPhys>> Live<F> {
    /// Returns what a rollback needs, if the snapshot is one to go back to, and is exact.
    pub(super) fn target(&self) -> Result<Target, Code> {
        let (snapshot, target) = self.snapshot.as_ref().zip(self.target).ok_or(Code::NoSnapshot)?;
        if !snapshot.is_exact() {
            return Err(self.invalid);
        }
        Ok(Target { root: snapshot.root(), ..target })
    }

    /// Notes a death, and returns how often the machine has died of the same in a row; 0 for no death. The
    /// same one again and again ends the snapshot, so that it takes its course.
    pub(super) fn die(&mut self, death: Death) -> Result<u64, Code> {
        let ticks = self.target.map_or(0, |target| target.repeat_ticks);
        let earlier = rollback::same(&self.deaths, death, ticks);
        if earlier == DEATHS {
            self.invalidate(Code::RollbackRepeated);
            return Err(Code::RollbackRepeated);
        }
        self.deaths.rotate_left(1);
        self.deaths[DEATHS - 1] = death;
        Ok(if death.0 == 0 { 0 } else { earlier as u64 + 1 })
    }

    /// Puts memory back to the instant, and keeps the snapshot for the next life. Returns the number of pages
    /// that were put back.
    pub(super) fn put_back(&mut self) -> Result<u64, Code> {
        let snapshot = self.snapshot.as_mut().ok_or(Code::NoSnapshot)?;
        let pages = snapshot.put_back(&mut self.ledger, self.memory).ok_or(self.invalid)?;
        if let Some(returned) = self.returned.take() {
            take_back(returned, &mut self.ledger);
        }
        self.copy_persistent();
        if self.target.is_some_and(|target| target.once) {
            self.invalidate(Code::NoSnapshot);
        }
        Ok(pages)
    }

    /// Notes that the driver gets a page back from the pool. Returns `false` if there is no room for that.
    fn note_returned(&mut self, page: HostPhys) -> bool {
        let (Some(snapshot), Some(_)) = (self.snapshot.as_ref(), self.target) else { return true };
        let depth = snapshot.view().depth();
        if self.returned.is_none() {
            self.returned = FrameMap::new(&mut self.ledger, depth).ok();
        }
        let noted = self.returned.map(|map| map.set(&mut self.ledger, GuestPhys::new(page.as_u64()), 1));
        noted.is_some_and(|noted| noted.is_ok())
    }

    /// Keeps the report of a rollback for the driver.
    pub(super) fn note(&mut self, report: RollbackReport) {
        let count = self.report.count + 1;
        self.report = RollbackReport { count, ..report };
        #[cfg(feature = "fault-injection")]
        self.compare_memory();
    }
}

/// Takes back the pages of the pool that the life that ended had got from the driver. In the memory of the
/// instant they are the pool's.
#[inline(never)]
fn take_back(returned: FrameMap, ledger: &mut Ledger) {
    let mut from = GuestPhys::new(0);
    while let Some((page, _)) = returned.next(ledger, from) {
        ledger.donate(page.identity());
        from = page.block_end(PageSize::Size4K);
    }
    returned.release(ledger);
}

/// Makes the snapshot invalid. This CPU stays on its tables until the end.
#[cold]
pub fn invalidate<V: Vendor>(_: &Area<V>, because: Code) {
    if let Some(mut guard) = V::tables().lock()
        && let Some(nested) = guard.as_mut()
    {
        nested.live.invalidate(because);
    }
}

/// Makes the snapshot invalid because this CPU leaves the hypervisor, which does not see its writes any more.
#[cold]
pub fn leave<V: Vendor>(area: &mut Area<V>) {
    area.cpu.on_snapshot = 0;
    area.cpu.is_held = 0;
    invalidate(area, Code::SnapshotLost);
}
