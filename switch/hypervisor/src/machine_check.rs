//! Machine checks that strike in the hypervisor. On Intel's processors any can. On AMD's one can where the
//! processor does not hold it while GIF = 0 (APM vol. 2, 15.17; HARDWARE A-33, I-9, L-23). Each belongs to
//! the system, which gets one #MC and reads the banks itself.
//!
//! A machine check is noted in the gate's block. If the guest is entered next, the entry injects #MC:
//! before a fault that the guest's instruction raises again, and after an event that nothing raises again.
//! If the CPU leaves, the gate raises it. MCG_STATUS.MCIP stays set until the system has seen it, so there
//! is never a second.
//!
//! A few instructions run on the hypervisor's IDT with the system's task state, or the other way round:
//! around an entry on AMD, and in the gate. There a machine check is a shutdown.

use core::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use mercury_preflight::bits::mcg_status;

use crate::cpu::{Area, Phase};
use crate::event;
use crate::host::entry::Next;
use crate::vendor::Vendor;
use crate::x86::{Hardware, msr};

/// [`mercury_abi::gate::GateBlock::machine_check`]: none is noted.
pub const NONE: u64 = 0;
/// A machine check is noted, and nothing delivers it yet.
const NOTED: u64 = 1;
/// The next entry delivers the machine check.
const INJECTED: u64 = 2;

/// Returns true if the system has yet to get a machine check, as far as is known.
#[inline]
#[must_use]
pub fn is_noted<V: Vendor>(area: &Area<V>) -> bool {
    word(area).load(Ordering::Relaxed) != NONE
}

/// Notes a machine check. Its handler calls this, after it has interrupted the hypervisor anywhere.
/// `resumable` is true if the interrupted code goes on.
pub fn note<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware, resumable: bool) {
    word(area).store(NOTED, Ordering::Relaxed);
    // On the way to the entry no code reads the note any more.
    if resumable && area.cpu.phase == Phase::Outside {
        hand_over(area, hardware);
    }
}

/// Settles the machine check of the last entry: the guest has got what the entry delivered.
pub fn exit_begins<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware) {
    if word(area).load(Ordering::Relaxed) != INJECTED {
        return;
    }
    let pending = V::pending_event(area, hardware).unwrap_or(0);
    let taken = V::was_entered(area) && pending & event::VALID == 0;
    let next = if taken { NONE } else { NOTED };
    // In one instruction: one that strikes here is noted over what was injected, and must stay so.
    if word(area).compare_exchange(INJECTED, next, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        V::inject(area, hardware, 0);
    }
}

/// Ends the hypervisor's work on an exit. From here on [`note`] acts by itself. A machine check noted
/// before is handed over here.
#[inline]
pub fn finish<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware, next: Next) -> Next {
    area.cpu.phase = Phase::Outside;
    compiler_fence(Ordering::SeqCst);
    if next == Next::Run && is_noted(area) {
        hand_over(area, hardware);
    }
    next
}

/// Forgets a machine check whose guest has been reset.
pub fn forget<V: Vendor>(area: &mut Area<V>) {
    word(area).swap(NONE, Ordering::Relaxed);
}

/// Ends the machine check in which the CPU's life has ended, for the life that begins. Its note in the
/// processor would make the next machine check a shutdown (MCG_STATUS.MCIP; APM vol. 2, 9.3.1.2, and SDM
/// vol. 3, "IA32_MCG_STATUS MSR"). The banks stay as they are, so that the kernel can read them.
pub fn end(hardware: &mut impl Hardware) {
    if hardware.read_msr(msr::MCG_STATUS).is_some_and(|status| status & mcg_status::MCIP != 0) {
        let _ = hardware.write_msr(msr::MCG_STATUS, 0);
    }
}

/// Hands a machine check to the guest with the next entry. If another event comes first, it follows with
/// the exit that the processor makes as soon as the guest takes interrupts again (APM vol. 2, 15.21.4; SDM,
/// "Interrupt-window exiting").
fn hand_over<V: Vendor>(area: &mut Area<V>, hardware: &mut impl Hardware) {
    // On the way out it stays the gate's.
    let Some(pending) = V::pending_event(area, hardware) else { return };
    if event::is_lost_if_replaced(pending) {
        V::await_window(area, hardware, true);
        return;
    }
    // A CPU that wants to leave still waits for it.
    if area.cpu.leave_pending == 0 {
        V::await_window(area, hardware, false);
    }
    V::inject(area, hardware, event::MACHINE_CHECK);
    word(area).store(INJECTED, Ordering::Relaxed);
}

/// Returns the state, which the handler of vector 18 changes at any moment. Only this CPU changes it.
fn word<V: Vendor>(area: &Area<V>) -> &AtomicU64 {
    let word = (&raw const area.cpu.gate.machine_check).cast_mut();
    // SAFETY: a field behind a reference, aligned; the hypervisor touches it nowhere else, and the gate does
    // while the hypervisor does not run.
    unsafe { AtomicU64::from_ptr(word) }
}
