//! The nested tables of this machine: one identity map for all CPUs, its pages, and nested faults.
//!
//! The map is built at load on a native CPU, a bounded piece a call. Afterwards only faults change it, in
//! two ways:
//!
//! * An address that was never touched before is mapped. That loosens the map.
//! * A hidden page that is written to gets the sink. That may turn the oldest of many sunk pages back to
//!   zeros. A CPU with a stale translation then still writes to the sink, which does no harm.
//!
//! So no other CPU needs to be told (HARDWARE A-5). The CPU that faulted flushes its own translations where
//! there was one.

use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use mercury_abi::code::Code;
use mercury_abi::gate::{BootInfo, OwnedRange};
use spin::Mutex;

use crate::address::{GuestPhys, HostPhys};
use crate::argument::{Argument, array};
use crate::cpu::Area;
use crate::integrity::Integrity;
use crate::mtrr::{Mtrrs, VariableRange};
use crate::native::{direct_map, phys_of};
use crate::paging::format::Format;
use crate::paging::identity::{FillOutcome, IdentityMap, SinkOutcome, Step};
use crate::paging::plan::Layout;
use crate::paging::table::{Depth, PageTable, Table, TablePages};
use crate::snapshot::live::{self, Live};
use crate::snapshot::system_memory::with_memory;
use crate::snapshot::view::Access;
use crate::vendor::Vendor;
use crate::x86::{Hardware, msr};

/// Most table pages that one call of [`build`] touches: about twenty microseconds (HARDWARE M-5).
const BUILD_BUDGET: usize = 4;
/// Most table pages that are spent on mapping all of the address width in advance: 2 MiB, for 48 bits.
const COMPLETE_PAGES: usize = 512;
/// End of the addresses that are mapped in advance. Those beyond are mapped when they are touched, even if
/// the kernel knows of them: bridge windows near the top of 52 bits would take more table pages than the
/// driver can give.
const EAGER_MAX: u64 = 1 << 48;
/// Attempts at the lock in an exit before the CPU gives up: a good second. The holder needs some
/// microseconds, unless its own host has stopped the processor for a while.
const LOCK_ATTEMPTS: usize = 1 << 25;

/// A page that stands in for others.
#[repr(C, align(4096))]
struct StandIn(core::cell::UnsafeCell<[u8; 4096]>);

// SAFETY: software never touches the content; only the system above does, through the nested tables.
unsafe impl Sync for StandIn {}

/// Page of zeros that the system reads in place of the hypervisor's memory.
static ZERO_PAGE: StandIn = StandIn(core::cell::UnsafeCell::new([0; 4096]));
/// Page that takes the system's writes to hidden memory, after the first.
static SINK_PAGE: StandIn = StandIn(core::cell::UnsafeCell::new([0; 4096]));

static ROOT_PHYS: AtomicU64 = AtomicU64::new(0);
/// True if the tables have five levels.
static FIVE_LEVEL: AtomicBool = AtomicBool::new(false);
static WANTED_PAGES: AtomicUsize = AtomicUsize::new(0);

/// The tables of one format. Each vendor has a static one; those of the machine's vendor are filled.
pub struct Tables<F>(Mutex<Slot<F>>);

/// A place for tables. The tag makes an empty place all zeros, which take no room in the image; an `Option`
/// would have another pattern for none.
#[repr(u8)]
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it is static, and there is no heap")]
pub(crate) enum Slot<F> {
    Empty = 0,
    Filled(Nested<F>) = 1,
}

impl<F> Slot<F> {
    pub(crate) const fn as_ref(&self) -> Option<&Nested<F>> {
        match self {
            Self::Empty => None,
            Self::Filled(nested) => Some(nested),
        }
    }

    pub(crate) const fn as_mut(&mut self) -> Option<&mut Nested<F>> {
        match self {
            Self::Empty => None,
            Self::Filled(nested) => Some(nested),
        }
    }
}

impl<F> Tables<F> {
    /// Returns tables that are yet to be planned.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(Slot::Empty))
    }

    /// Locks the tables. `None` if the holder of the lock does not release it in time.
    pub(crate) fn lock(&self) -> Option<spin::MutexGuard<'_, Slot<F>>> {
        for _ in 0..LOCK_ATTEMPTS {
            if let Some(guard) = self.0.try_lock() {
                return Some(guard);
            }
            core::hint::spin_loop();
        }
        None
    }
}

impl<F> Default for Tables<F> {
    fn default() -> Self {
        Self::new()
    }
}

/// The identity map and its pages, and the snapshot and dirty log over the same memory.
#[derive(Debug)]
pub(crate) struct Nested<F> {
    pub(crate) map: IdentityMap<F>,
    pub(crate) pool: Pool,
    /// Address of the driver's [`BootInfo`], virtual.
    boot_virt: u64,
    pub(crate) live: Live<F>,
    pub(crate) integrity: Integrity<F>,
}

/// Table pages that the driver has donated.
#[derive(Debug)]
pub(crate) struct Pool {
    /// Host-physical addresses of the pages.
    pages: &'static [u64],
    used: usize,
}

impl Pool {
    /// Checks the driver's array of pages.
    #[inline(never)]
    fn pages(boot: &BootInfo) -> Result<&'static [u64], Code> {
        // SAFETY: the driver keeps the array until unload, or until the next call of `build` brings
        // another, in memory that is mapped as long. Entries are only added.
        unsafe { array(boot.pool_virt, boot.pool_count) }
    }
}

impl TablePages for Pool {
    fn allocate(&mut self) -> Option<HostPhys> {
        let page = *self.pages.get(self.used)?;
        self.used += 1;
        Some(HostPhys::new(page))
    }

    fn table(&mut self, phys: HostPhys) -> &mut Table {
        let table = phys.in_direct_map(direct_map()).as_u64();
        // SAFETY: `phys` came from `allocate`, so it is a page that the driver mapped at its direct-map
        // address for the hypervisor alone; the lock around `Pool` makes this the only reference.
        unsafe { &mut *core::ptr::with_exposed_provenance_mut::<Table>(table as usize) }
    }
}

/// Returns the root of the nested tables.
#[must_use]
pub fn root() -> HostPhys {
    HostPhys::new(ROOT_PHYS.load(Ordering::Relaxed))
}

/// Sets the root with which CPUs are attached, and go on after a snapshot. Returns the root.
pub(crate) fn set_root(root: HostPhys) -> HostPhys {
    ROOT_PHYS.store(root.as_u64(), Ordering::Relaxed);
    root
}

/// Returns the root of nested tables that map nothing.
#[must_use]
pub fn empty_root() -> HostPhys {
    phys_of(&ZERO_PAGE)
}

/// Returns the number of levels of the nested tables.
#[must_use]
pub fn depth() -> Depth {
    if FIVE_LEVEL.load(Ordering::Relaxed) { Depth::Five } else { Depth::Four }
}

/// Returns the number of pages that the last [`build`] asked for.
#[must_use]
pub fn wanted_pages() -> u64 {
    WANTED_PAGES.load(Ordering::Relaxed) as u64
}

/// Plans the map of this machine.
///
/// # Errors
/// The map cannot reach everything that the kernel knows of.
pub fn init<V: Vendor>(boot: &BootInfo, boot_virt: u64, hardware: &mut impl Hardware) -> Result<(), Code> {
    let depth = V::depth(boot, hardware);
    FIVE_LEVEL.store(depth == Depth::Five, Ordering::Relaxed);
    let physical_bits = V::physical_bits(hardware);
    if boot.iomem_end_phys > 1 << physical_bits.min(depth.address_bits()) {
        return Err(Code::MemoryBeyondMap);
    }
    let pool = Pool { pages: Pool::pages(boot)?, used: 0 };
    let layout = Layout {
        physical_bits,
        depth,
        largest: V::largest_page(hardware),
        eager_end: GuestPhys::new(boot.iomem_end_phys.min(EAGER_MAX)),
        complete_pages: COMPLETE_PAGES,
        zero_page: empty_root(),
    };
    let top_of_memory_2 = V::top_of_memory_2(hardware);
    let map = IdentityMap::new(layout, read_mtrrs(hardware, physical_bits, top_of_memory_2));
    *V::tables().0.lock() =
        Slot::Filled(Nested { map, pool, boot_virt, live: Live::new(), integrity: Integrity::new() });
    Ok(())
}

/// Builds some of the map.
///
/// # Errors
/// `More`: call again. `NeedPages`: donate [`wanted_pages`] and call again.
pub fn build<V: Vendor>() -> Result<(), Code> {
    let mut guard = V::tables().0.lock();
    let nested = guard.as_mut().ok_or(Code::NotLoaded)?;
    // SAFETY: the driver keeps its `BootInfo` at this address until unload and changes it between calls
    // only.
    let boot = unsafe { Argument::<BootInfo>::at(nested.boot_virt) }?;
    nested.pool.pages = Pool::pages(&boot)?;
    // SAFETY: likewise for the array of owned ranges.
    let owned: &[OwnedRange] = unsafe { array(boot.owned_virt, boot.owned_count) }?;
    let step = nested.map.build_step(&mut nested.pool, owned, BUILD_BUDGET);
    match step {
        Step::More => Err(Code::More),
        Step::NeedPages(count) => {
            WANTED_PAGES.store(count, Ordering::Relaxed);
            Err(Code::NeedPages)
        }
        Step::Done => {
            let root = nested.map.root().ok_or(Code::NotLoaded)?;
            ROOT_PHYS.store(root.as_u64(), Ordering::Relaxed);
            Ok(())
        }
    }
}

/// Returns true if the MTRRs are still those that the tables were planned with.
#[must_use]
pub fn types_are_current<V: Vendor>(hardware: &mut impl Hardware) -> bool {
    let physical_bits = V::physical_bits(hardware);
    let top_of_memory_2 = V::top_of_memory_2(hardware);
    let mtrrs = read_mtrrs(hardware, physical_bits, top_of_memory_2);
    let guard = V::tables().lock();
    guard.is_some_and(|nested| nested.as_ref().is_some_and(|nested| *nested.map.mtrrs() == mtrrs))
}

/// Outcome of a nested fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NestedAnswer {
    /// The address is mapped now.
    Filled,
    /// A write to hidden memory: it goes nowhere.
    HiddenWrite,
    /// The page can be written: another CPU was faster. This CPU may still have the old translation.
    Raced,
    /// There is no page for the tables, no such address, or the lock was not released.
    Exhausted,
    /// Beneath a snapshot or a dirty log: the write can be made, after a copy where one was needed.
    Kept {
        /// TSC ticks for which the writer has to wait, because the pool runs low.
        wait: u64,
    },
}

/// Answers a nested fault of this CPU at `address`, guest-physical. `access` is what it was beyond reading.
/// Never waits for long: the holder of the lock may be a CPU that died with it.
#[must_use]
pub fn fault<V: Vendor>(
    area: &mut Area<V>,
    hardware: &mut impl Hardware,
    address: u64,
    access: Option<Access>,
) -> NestedAnswer {
    match area.cpu.on_snapshot {
        0 => answer::<V>(0, address, access),
        tables => with_memory(area, hardware, |_, _| answer::<V>(tables, address, access)),
    }
}

/// Answers a nested fault for a CPU whose [`crate::cpu::Cpu::on_snapshot`] is `tables`.
fn answer<V: Vendor>(tables: u32, address: u64, access: Option<Access>) -> NestedAnswer {
    let Some(mut guard) = V::tables().lock() else { return NestedAnswer::Exhausted };
    let Some(nested) = guard.as_mut() else { return NestedAnswer::Exhausted };
    let address = GuestPhys::new(address);
    match tables {
        0 => nested.answer(address, access == Some(Access::Write)),
        _ => nested.answer_beneath_snapshot(address, access, tables),
    }
}

/// Returns true if the system reaches the same memory at this address, and can write there: the page is not
/// hidden.
#[must_use]
pub fn is_identity<V: Vendor>(address: GuestPhys) -> bool {
    V::tables()
        .lock()
        .is_some_and(|mut guard| guard.as_mut().is_some_and(|nested| nested.is_identity(address)))
}

impl<F: Format<Address = GuestPhys>> Nested<F> {
    fn is_identity(&mut self, address: GuestPhys) -> bool {
        let Some(tables) = self.map.tables() else { return false };
        tables
            .lookup(&mut self.pool, address)
            .is_some_and(|mapping| mapping.writable && mapping.phys.as_u64() == address.as_u64())
    }

    /// Returns the identity map's tables, once they are built.
    pub(crate) const fn tables(&self) -> Option<PageTable<F>> {
        self.map.tables()
    }

    /// Answers by the tables of the snapshot or of the dirty log first. The identity map answers what they
    /// only share, and they adopt the change.
    fn answer_beneath_snapshot(
        &mut self,
        address: GuestPhys,
        access: Option<Access>,
        tables: u32,
    ) -> NestedAnswer {
        let keeps = |access| match tables {
            live::ON_LOG => self.live.permit_on_log(address, access),
            _ => self.live.permit_on_snapshot(address, access),
        };
        if access.is_some_and(keeps) {
            return NestedAnswer::Kept { wait: self.live.throttle() };
        }
        let answer = self.answer(address, access == Some(Access::Write));
        self.live.adopt(address);
        answer
    }

    pub(crate) fn answer(&mut self, address: GuestPhys, write: bool) -> NestedAnswer {
        let answer = self.answer_by_map(address, write);
        self.integrity.adopt(&mut self.pool, address);
        answer
    }

    fn answer_by_map(&mut self, address: GuestPhys, write: bool) -> NestedAnswer {
        match self.map.fill(&mut self.pool, address) {
            Ok(FillOutcome::Filled) => return NestedAnswer::Filled,
            Ok(FillOutcome::Present) if write => {}
            // Another CPU has filled it meanwhile; what was absent is in no translation.
            Ok(FillOutcome::Present) => return NestedAnswer::Filled,
            Ok(FillOutcome::OutOfRange) | Err(_) => return NestedAnswer::Exhausted,
        }
        match self.map.sink(&mut self.pool, address, phys_of(&SINK_PAGE)) {
            SinkOutcome::Sunk => NestedAnswer::HiddenWrite,
            SinkOutcome::Writable => NestedAnswer::Raced,
            SinkOutcome::Absent => NestedAnswer::Exhausted,
        }
    }
}

/// Reads the MTRRs of this CPU. Where they are disabled or missing, all memory is uncacheable.
fn read_mtrrs(hardware: &mut impl Hardware, physical_bits: u32, top_of_memory_2: Option<u64>) -> Mtrrs {
    const COUNT: u64 = 0xFF;
    let mut variable = [VariableRange::default(); 32];
    let count = hardware.read_msr(msr::MTRR_CAP).unwrap_or(0) & COUNT;
    for (number, range) in variable.iter_mut().enumerate().take(count as usize) {
        let base = msr::MTRR_PHYS_BASE0 + 2 * number as u32;
        range.base = hardware.read_msr(base).unwrap_or(0);
        range.mask = hardware.read_msr(base + 1).unwrap_or(0);
    }
    let fixed = msr::MTRR_FIXED.map(|index| hardware.read_msr(index).unwrap_or(0));
    let default = hardware.read_msr(msr::MTRR_DEF_TYPE).unwrap_or(0);
    Mtrrs::from_registers(default, fixed, &variable, physical_bits, top_of_memory_2)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::paging::format::{AmdNested, IntelExtended};
    use crate::paging::plan::LargestPage;

    /// Guest-physical address of a hidden page.
    pub const HIDDEN: GuestPhys = GuestPhys::new(0x20_0000);
    /// Address that is not mapped yet.
    pub const UNTOUCHED: u64 = 1 << 33;
    /// Address that cannot be mapped.
    pub const BEYOND: u64 = 1 << 41;

    /// MTRRs of the machine whose tables these are: the second half of the first 4 GiB is uncacheable.
    pub const MTRRS: [(u32, u64); 4] = [
        (msr::MTRR_CAP, 0x501),
        (msr::MTRR_DEF_TYPE, 0xC06),
        (msr::MTRR_PHYS_BASE0, 0x8000_0000),
        (msr::MTRR_PHYS_BASE0 + 1, 0xFF_8000_0800),
    ];
    const WRITE_BACK: [u64; 11] = [0x0606_0606_0606_0606; 11];

    /// Returns all of the machine's MTRRs.
    pub fn all_mtrrs() -> impl Iterator<Item = (u32, u64)> {
        MTRRS.into_iter().chain(msr::MTRR_FIXED.into_iter().zip(WRITE_BACK))
    }

    /// Returns a map of 40 bits with one hidden page, in memory that stays.
    pub fn small<F: Format<Address = GuestPhys>>() -> Nested<F> {
        let page = || StandIn(core::cell::UnsafeCell::new([0; 4096]));
        let pages: &[StandIn] = (0..64).map(|_| page()).collect::<Vec<_>>().leak();
        let addresses: &[u64] = pages
            .iter()
            .map(|page| core::ptr::from_ref(page).expose_provenance() as u64)
            .collect::<Vec<_>>()
            .leak();
        let layout = Layout {
            physical_bits: 40,
            depth: Depth::Four,
            largest: LargestPage::OneGibibyte,
            eager_end: GuestPhys::new(1 << 32),
            complete_pages: 0,
            zero_page: HostPhys::new(0x1000),
        };
        let [_, (_, default), (_, base), (_, mask)] = MTRRS;
        let variable = [VariableRange { base, mask }];
        let mtrrs = Mtrrs::from_registers(default, WRITE_BACK, &variable, 40, None);
        let pool = Pool { pages: addresses, used: 0 };
        let mut nested = Nested {
            map: IdentityMap::new(layout, mtrrs),
            pool,
            boot_virt: 0,
            live: Live::new(),
            integrity: Integrity::new(),
        };
        let owned = [OwnedRange { start_phys: HIDDEN.as_u64(), pages: 1 }];
        assert_eq!(nested.map.build_step(&mut nested.pool, &owned, 1000), Step::Done);
        nested
    }

    /// Makes the nested tables of tests those of this machine.
    pub fn install<V: Vendor>() {
        *V::tables().0.lock() = Slot::Filled(small());
    }

    /// Two CPUs write to one hidden page: the second finds it sunk.
    #[test]
    fn a_write_that_another_cpu_was_answered_for_is_a_race() {
        race::<AmdNested>();
        race::<IntelExtended>();
    }

    fn race<F: Format<Address = GuestPhys>>() {
        let mut nested = small::<F>();
        assert_eq!(nested.answer(HIDDEN, true), NestedAnswer::HiddenWrite);
        assert_eq!(nested.answer(HIDDEN, true), NestedAnswer::Raced);
        assert_eq!(nested.answer(GuestPhys::new(BEYOND), true), NestedAnswer::Exhausted);
    }
}
