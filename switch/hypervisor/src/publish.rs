//! Counters and the log, as user space reads them (see [`mercury_abi::shared`]).

use mercury_abi::code::Code;
use mercury_abi::shared::{ExitReason, LOG_RECORDS, LogKind, READ_ONLY_NONE, SHARED_MAGIC};

use crate::cpu::Area;
use crate::vendor::Vendor;

/// Makes a CPU's block valid. It was zeroed by the driver.
pub fn prepare<V: Vendor>(area: &mut Area<V>) {
    let cpu = area.cpu.gate.cpu;
    let shared = area.shared();
    shared.cpu = cpu;
    shared.magic = SHARED_MAGIC;
}

/// Counts an exit of this reason.
#[inline]
pub fn count<V: Vendor>(area: &mut Area<V>, reason: ExitReason) {
    // Only this CPU writes the block; the system above may scribble on it, so nothing is concluded from it.
    let counter = &mut area.shared().exits[reason as usize];
    *counter = counter.wrapping_add(1);
}

/// Adds the time of one exit.
#[inline]
pub fn add_ticks<V: Vendor>(area: &mut Area<V>, ticks: u64) {
    let shared = area.shared();
    shared.exit_ticks = shared.exit_ticks.wrapping_add(ticks);
}

/// Publishes that this CPU is attached now.
#[inline]
pub fn attached<V: Vendor>(area: &mut Area<V>) {
    let shared = area.shared();
    shared.attached = 1;
    shared.attaches = shared.attaches.wrapping_add(1);
}

/// Publishes that this CPU leaves. `because` is `Ok` for a detach that the driver asked for.
#[inline]
pub fn departed<V: Vendor>(area: &mut Area<V>, because: Code) {
    let shared = area.shared();
    shared.attached = 0;
    shared.detaches = shared.detaches.wrapping_add(1);
    // A CPU that attaches says nothing of its pages until the driver asks for them again.
    shared.read_only = READ_ONLY_NONE;
    if because != Code::Ok {
        shared.left_because = u64::from(because as u32);
    }
}

/// Publishes that this CPU is native. If its block says attached, that is a departure, for this reason.
pub fn native<V: Vendor>(area: &mut Area<V>, because: Code) {
    if area.shared().attached != 0 {
        departed(area, because);
    }
}

/// Writes a record to this CPU's ring.
#[inline]
pub fn log<V: Vendor>(area: &mut Area<V>, kind: LogKind, tsc: u64, arguments: [u64; 5]) {
    let cpu = area.cpu.gate.cpu;
    let shared = area.shared();
    let sequence = shared.log_written.wrapping_add(1);
    let Some(slot) = shared.log.get_mut((sequence.wrapping_sub(1) % LOG_RECORDS as u64) as usize) else {
        return;
    };
    let slot = core::ptr::from_mut(slot);
    // SAFETY: `slot` points into this CPU's block. Volatile, in this order, so that a reader never takes
    // half a record for a whole one (stores are not reordered on this architecture).
    unsafe {
        (&raw mut (*slot).sequence).write_volatile(0);
        (&raw mut (*slot).tsc).write_volatile(tsc);
        (&raw mut (*slot).kind).write_volatile(kind as u32);
        (&raw mut (*slot).cpu).write_volatile(cpu);
        let fields = (&raw mut (*slot).arguments).cast::<u64>();
        for (index, argument) in arguments.into_iter().enumerate() {
            fields.add(index).write_volatile(argument);
        }
        (&raw mut (*slot).sequence).write_volatile(sequence);
    }
    shared.log_written = sequence;
}
