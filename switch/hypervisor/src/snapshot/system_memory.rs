//! Access to the system's memory: the page tables of the driver that map it while there may be a snapshot
//! or a dirty log. The hypervisor's own tables map the hypervisor alone.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::address::HostPhys;
use crate::cpu::Area;
use crate::native::direct_map;
use crate::vendor::Vendor;
use crate::x86::Hardware;

/// Host-physical root of page tables that map all of memory besides the hypervisor; 0: there are none.
static SYSTEM_TABLES: AtomicU64 = AtomicU64::new(0);

/// Notes the root of the tables that the driver has made.
pub(super) fn set_tables(root_phys: u64) {
    SYSTEM_TABLES.store(root_phys, Ordering::Relaxed);
}

/// Forgets the tables, which the driver is about to free.
pub(super) fn forget_tables() {
    set_tables(0);
}

/// Returns true if the driver has made tables that map the system's memory.
pub(super) fn has_tables() -> bool {
    SYSTEM_TABLES.load(Ordering::Relaxed) != 0
}

/// Does `work` on page tables that map the system's memory, if there are any.
///
/// Predictions that user mode has trained are forgotten before. If the CPU came from beneath a snapshot or
/// a dirty log, the world switch has done so already.
pub(crate) fn with_memory<V: Vendor, H: Hardware, T>(
    area: &mut Area<V>,
    hardware: &mut H,
    work: impl FnOnce(&mut Area<V>, &mut H) -> T,
) -> T {
    let (own, system) = (hardware.own_tables(), SYSTEM_TABLES.load(Ordering::Relaxed));
    if system == 0 || system == own {
        return work(area, hardware);
    }
    if area.cpu.on_snapshot == 0 {
        hardware.forget_predictions(area.cpu.barriers);
    }
    hardware.load_own_tables(system);
    let result = work(area, hardware);
    hardware.load_own_tables(own);
    result
}

/// Returns the direct-map address of a page.
pub(crate) fn page<T>(phys: HostPhys) -> *mut T {
    core::ptr::with_exposed_provenance_mut(phys.in_direct_map(direct_map()).as_u64() as usize)
}
