//! KVM on AMD: the system above uses SVM itself.
//!
//! The nested tables are the identity map, so every physical address in KVM's control block is a
//! host-physical one. The block runs *in place*: VMRUN of the system exits, and VMRUN here gets the same
//! address. The guest's exit belongs to KVM alone: nothing in it is read, copied or merged. VMLOAD, VMSAVE,
//! CLGI and INVLPGA are not intercepted. Three things are left to do:
//!
//! * **EFER.SVME and VM_HSAVE_PA** are numbers that the system reads back ([`super::msr`]). The processor
//!   has the hypervisor's values.
//! * **GIF** is 0 after a guest's exit until the system's STGI, but entering the system sets it (APM vol.
//!   2, 15.17). So the system is entered with V_INTR_MASKING, under which the hypervisor's RFLAGS.IF, which
//!   is 0, holds physical interrupts back. NMIs exit: each is taken from the processor, and injected at
//!   STGI, which exits until then. SMIs and INIT are not held back.
//! * **The address-space identifier** of the system above must not be the guest's. It is the highest one,
//!   or the one below when KVM has come to that. KVM's block is read through a window: a page whose
//!   page-table entry is the only one that the hypervisor ever changes in its own tables.
//!
//! CLGI runs unseen. So an exit between KVM's CLGI and its VMRUN would open GIF, with the guest's FS, GS
//! and TR in the processor already. There is none: KVM executes no instruction there that exits.
//!
//! While a snapshot or a dirty log is live, the first write to a page exits, between CLGI and VMRUN too. So
//! CLGI exits, and GIF is 0 from then on, as it is after a guest's exit. A snapshot cannot begin or end
//! while GIF is 0: the driver has each CPU come by an interrupt, which waits for STGI, and the other CPUs
//! wait for this one.
//!
//! Guests then run on shadows of KVM's nested tables ([`super::shadow`]), and each of their exits comes
//! here first. Their blocks are KVM's own as well, but for the root. VMSAVE, which writes by physical
//! address, exits.
//!
//! A guest whose memory or registers are encrypted needs the host's own save area in the processor, and
//! cannot run so. Interrupts that reach a guest without an exit (AVIC) exist on no emulator. In both cases
//! the CPU leaves ([`Code::GuestUnsupported`]) and executes VMRUN natively.

mod beneath_snapshot;
#[cfg(test)]
mod tests;

use mercury_abi::code::Code;
use mercury_abi::facts::CpuFacts;
use mercury_abi::gate::{KEEP_GIF_CLEAR, KEEP_SVME};
use mercury_abi::shared::ExitReason;
use mercury_preflight::bits::{cr4, efer};

use beneath_snapshot::permit_write;
pub use beneath_snapshot::{clear_gif, exited, save_state};

use super::shadow::{self, Prepared};
use super::vmcb::{
    INTERCEPT_ALL_EVENTS, INTERCEPT_CLGI, INTERCEPT_INVLPGA, INTERCEPT_IRET, INTERCEPT_MISC2,
    INTERCEPT_MISC2_SHARED, INTERCEPT_NMI, INTERCEPT_SHUTDOWN, INTERCEPT_STGI, INTERCEPT_VMSAVE,
    NESTED_CONTROL_ENCRYPTED, TLB_FLUSH_ALL, TLB_KEEP, VIRTUAL_APIC, VIRTUAL_INTERRUPT, VIRTUAL_MASKING,
    Vmcb, event, exit_code,
};
use super::{Area, Own};
use crate::address::GuestPhys;
use crate::exit::{Answer, Fault};
use crate::host::entry::Next;
use crate::paging::table::Depth;
use crate::snapshot::live::{self, WritePermit};
use crate::snapshot::system_memory::with_memory;
use crate::x86::{DR7_CLEAR, Hardware, RFLAGS_IF, RFLAGS_TF, msr};
use crate::{exit, nested, publish};

/// [`super::Own::block_phys`]: the window shows no page. No block begins at this address.
pub const NO_BLOCK: u64 = u64::MAX;
/// An NMI, as [`Vmcb::inject_event`] has it.
pub const NMI: u64 = event::VALID | event::NMI | 2;

/// [`super::Own::around_guest`]: the system's SPEC_CTRL is in the control block and not in the processor.
pub const LENT: u32 = 1 << 0;
/// [`super::Own::around_guest`]: the guest runs on a shadow.
pub const SHADOWED: u32 = 1 << 1;

/// Chooses the address-space identifiers of the system above: the two highest (CPUID 8000_000Ah EBX; APM
/// vol. 2, 15.5.1).
pub fn learn(area: &mut Area, facts: &CpuFacts) {
    let count = facts.cpuid_8000_000a.ebx;
    area.own.asids = [count.saturating_sub(1), count.saturating_sub(2)];
}

/// Returns true if KVM may use SVM, as the driver says.
pub fn may(area: &mut Area) -> bool {
    // SAFETY: a field behind a reference; the driver may write it at any time.
    unsafe { (&raw const area.shared().kvm_may).read_volatile() != 0 }
}

/// Returns true if the system above has set EFER.SVME.
#[must_use]
pub const fn has_svm(area: &Area) -> bool {
    area.own.guest_efer & msr::EFER_SVME != 0
}

/// Prepares an attach: no guest is known.
pub fn attach(area: &mut Area) {
    let own = &mut area.own;
    (own.enter_guest, own.gif_is_clear, own.nmi_held, own.quick_guests) = (0, 0, 0, 0);
    // Of a snapshot that was kept when this CPU went offline.
    own.extended.forget();
    forget(own);
    arrange(area);
}

/// Forgets what is known of a guest: blocks and tables have changed.
pub const fn forget(own: &mut Own) {
    own.guest_exited = 0;
    own.around_guest &= !SHADOWED;
    own.shadow.forget();
    own.block_phys = NO_BLOCK;
}

/// Sets the intercepts of SVM's instructions, by the system's own EFER.SVME.
pub fn arrange(area: &mut Area) {
    let shared = has_svm(area);
    let control = &mut area.control;
    if shared {
        control.intercept_misc1 &= !INTERCEPT_INVLPGA;
        control.intercept_misc2 = INTERCEPT_MISC2_SHARED;
    } else {
        control.intercept_misc1 |= INTERCEPT_INVLPGA;
        control.intercept_misc2 = INTERCEPT_MISC2;
    }
    if area.own.gif_is_clear != 0 {
        control.intercept_misc2 |= INTERCEPT_STGI;
    }
    if area.cpu.on_snapshot != 0 {
        control.intercept_misc2 |= INTERCEPT_VMSAVE | INTERCEPT_CLGI;
    }
}

/// Decides after an exit if the world switch may answer the next ones by itself.
pub fn settle(area: &mut Area, next: Next) {
    let plain = area.cpu.on_snapshot | area.cpu.leave_pending == 0 && next == Next::Run;
    area.own.quick_guests = u32::from(plain && has_svm(area));
    let on_snapshot = area.cpu.on_snapshot != 0;
    if has_svm(area) && on_snapshot != (area.control.intercept_misc2 & INTERCEPT_VMSAVE != 0) {
        arrange(area);
    }
    if !on_snapshot && area.own.shadow.is_there() {
        // The processor may have kept what it read of blocks: each of them is entered the long way once more.
        area.own.shadow.forget();
        area.own.block_phys = NO_BLOCK;
    }
    if next == Next::Leave {
        area.own.enter_guest = 0;
        remove_shadow(area);
    }
}

/// Answers VMRUN of the system above: its guest is entered next, on its own block. FS, GS, TR and the
/// syscall MSRs, which KVM left in the processor for the guest, are still in force. An exit saves them with
/// the system's control block.
pub fn run(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    publish::count(area, ExitReason::GuestRun);
    let block = area.control.rax;
    if !block.is_multiple_of(4096) || !show(area, hardware, block) {
        return Answer::Inject(Fault::GeneralProtection);
    }
    let shown = window(area);
    if area.own.nmi_held != 0 && shown.intercepts & INTERCEPT_NMI != 0 {
        return match permit_write(area, hardware, block) {
            Some(WritePermit::Granted) => end_at_once(area, exit_code::NMI),
            Some(WritePermit::Wait) => Answer::Retry,
            _ => Answer::Inject(Fault::GeneralProtection),
        };
    }
    let encrypted = shown.nested_control as u8 & NESTED_CONTROL_ENCRYPTED != 0;
    if encrypted || shown.virtual_interrupt & VIRTUAL_APIC != 0 {
        return Answer::Depart(Code::GuestUnsupported);
    }
    if shown.asid == area.control.asid {
        let [first, second] = area.own.asids;
        let other = if area.control.asid == first { second } else { first };
        if other == 0 {
            return Answer::Depart(Code::GuestUnsupported);
        }
        area.control.asid = other;
        area.control.tlb_control = TLB_FLUSH_ALL;
    }
    if area.cpu.on_snapshot != 0 {
        match with_memory(area, hardware, |area, _| shadow::prepare(area)) {
            Prepared::InPlace => {}
            Prepared::Shadowed => area.own.around_guest |= SHADOWED,
            Prepared::Wait => return Answer::Retry,
            // As if an interrupt had come: KVM takes interrupts, and comes again.
            Prepared::WaitOutside => return end_at_once(area, exit_code::INTR),
            // The guest writes where the snapshot's tables do not see it.
            Prepared::Impossible => live::invalidate(area, Code::SnapshotGuest),
        }
    }
    forget_block(area);
    #[cfg(any(debug_assertions, feature = "fault-injection"))]
    assert!(is_as_natively(area, hardware), "VMRUN would find what KVM has not");
    area.own.enter_guest = 1;
    Answer::Skip
}

/// Returns true if VMRUN finds in the processor's own registers what it would find without Mercury. It
/// takes these from there and not from the block:
///
/// * the depth of the nested tables, and whether they have NX bits (CR4.LA57 and EFER.NXE; APM vol. 2,
///   15.25.3),
/// * the memory types that they select (PAT; 15.25.8),
/// * the part of SPEC_CTRL that is in force besides the guest's (15.35).
///
/// Those registers are the hypervisor's, and must be as KVM has them. The driver gives the depth of the
/// system's tables, and refuses an unusual PAT. The system cannot stay attached if it clears NXE or sets
/// another first type in the PAT ([`super::msr`]). In the processor SPEC_CTRL is 0, and becomes the
/// system's value for the run. No emulator heeds the last two.
#[must_use]
pub fn is_as_natively(area: &Area, hardware: &mut impl Hardware) -> bool {
    let five_level = area.control.cr4 & cr4::LA57 != 0;
    let is_lent = area.own.around_guest & LENT != 0;
    five_level == (nested::depth() == Depth::Five)
        && hardware.read_msr(msr::EFER).is_some_and(|efer| (efer ^ area.own.guest_efer) & efer::NXE == 0)
        && hardware.read_msr(msr::PAT) == Some(area.control.g_pat)
        && (!is_lent || hardware.read_msr(msr::SPEC_CTRL) == Some(0))
}

/// Ends the guest before its first instruction: VMRUN sets GIF, and a pending event exits at once, with the
/// event that was to be injected (APM vol. 2, 15.17 and 15.20). The block can be written. Translations that
/// KVM wants flushed are flushed, for it asks once.
fn end_at_once(area: &mut Area, code: u64) -> Answer {
    // SAFETY: a control block of KVM's in the window; no other code uses it before KVM goes on.
    let block = unsafe { &mut *block(area) };
    if block.tlb_control != TLB_KEEP {
        area.control.tlb_control = TLB_FLUSH_ALL;
        area.own.shadow.expire();
    }
    (block.exit_code, block.exit_info1, block.exit_info2) = (code, 0, 0);
    block.exit_event = core::mem::take(&mut block.inject_event);
    back_from_guest(area);
    Answer::Skip
}

/// Lets the system go on after its VMRUN (APM vol. 2, 15.6). The world switch does the same.
fn back_from_guest(area: &mut Area) {
    area.control.dr7 = DR7_CLEAR;
    area.control.rflags &= !RFLAGS_IF;
    close(area);
}

/// Gives KVM's block its own nested root back.
fn remove_shadow(area: &mut Area) {
    if area.own.around_guest & SHADOWED == 0 {
        return;
    }
    area.own.around_guest &= !SHADOWED;
    // SAFETY: as for every other use of the window; the guest does not run.
    unsafe { (*block(area)).nested_cr3 = area.own.guest_nested_cr3 };
}

/// Has the processor read all of the block again: another block may have run meanwhile (APM vol. 2,
/// 15.15.3).
fn forget_block(area: &mut Area) {
    // SAFETY: as for every other use of the window; the guest does not run.
    unsafe { (*block(area)).clean = 0 };
}

/// Clears GIF for the system above.
fn close(area: &mut Area) {
    area.own.gif_is_clear = 1;
    let control = &mut area.control;
    control.virtual_interrupt |= VIRTUAL_MASKING;
    control.intercept_misc1 |= INTERCEPT_NMI;
    control.intercept_misc2 |= INTERCEPT_STGI;
}

/// Emulates STGI of the system above. If GIF is 1 already, as far as is known here, the instruction is
/// done.
pub fn set_gif(area: &mut Area) -> Answer {
    publish::count(area, ExitReason::GuestEnd);
    open(area);
    if area.own.nmi_held != 0 {
        area.own.nmi_held = 0;
        area.control.inject_event = NMI;
    }
    Answer::Skip
}

/// Sets GIF for the system above.
fn open(area: &mut Area) {
    area.own.gif_is_clear = 0;
    let control = &mut area.control;
    control.virtual_interrupt &= !VIRTUAL_MASKING;
    control.intercept_misc2 &= !INTERCEPT_STGI;
    // While a snapshot is kept NMIs exit, but for the one that is being handled.
    if control.intercept_misc1 & INTERCEPT_SHUTDOWN == 0 || control.intercept_misc1 & INTERCEPT_IRET != 0 {
        control.intercept_misc1 &= !INTERCEPT_NMI;
    }
}

/// Holds an NMI while GIF is 0 for the system above. The processor would make the same exit again and
/// again, so the NMI is taken from it. Others are blocked from here to the end of the system's handler,
/// which STGI starts.
pub fn hold_nmi(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    publish::count(area, ExitReason::HeldNmi);
    hardware.take_nmi();
    area.own.nmi_held = 1;
    Answer::Retry
}

/// Returns the state of SVM that the gate leaves to a system with this EFER.
#[must_use]
pub const fn keep(efer: u64, gif_is_clear: bool) -> u64 {
    match (efer & msr::EFER_SVME != 0, gif_is_clear) {
        (false, _) => 0,
        (true, false) => KEEP_SVME,
        (true, true) => KEEP_SVME | KEEP_GIF_CLEAR,
    }
}

/// Makes the CPU native while KVM uses SVM, and lets KVM go on. GIF is as KVM knows it: 0 at VMRUN too, for
/// which KVM may have executed CLGI unseen. A held NMI is lost: only a failure makes a CPU leave there.
pub fn leave(area: &mut Area, hardware: &mut impl Hardware) {
    if !has_svm(area) {
        return leave_without(area);
    }
    remove_shadow(area);
    forget_translations(area, hardware);
    let at_run = area.control.exit_code == super::vmcb::exit_code::VMRUN;
    let gif_is_clear = area.own.gif_is_clear != 0 || at_run;
    area.cpu.gate.outward.svm = keep(area.own.guest_efer, gif_is_clear);
    if area.own.nmi_held != 0 {
        area.own.nmi_held = 0;
        exit::lose_event(area, hardware, NMI);
    }
}

/// Makes the CPU native where the system does not use SVM. A detach comes here without saving vector
/// registers.
#[inline]
pub fn leave_without(area: &mut Area) {
    debug_assert!(!has_svm(area));
    remove_shadow(area);
    area.cpu.gate.outward.svm = 0;
}

/// Flushes all translations. KVM may give the system's identifier to a guest, and flushes only when it has
/// used up all identifiers (APM vol. 2, 15.16.1; HARDWARE A-3). A flush takes an entry. This entry has
/// nested tables that map nothing, so that it ends with the first fetch, whatever is pending or masked. No
/// emulator keeps translations that long.
fn forget_translations(area: &mut Area, hardware: &mut impl Hardware) {
    let control = &mut area.control;
    let before = (
        (control.intercept_misc1, control.virtual_interrupt, control.interrupt_shadow, control.inject_event),
        (control.exit_code, control.exit_info1, control.exit_info2, control.exit_event),
        (control.nested_cr3, control.rflags, control.dr7),
    );
    control.intercept_misc1 |= INTERCEPT_ALL_EVENTS;
    control.virtual_interrupt &= !VIRTUAL_INTERRUPT;
    control.interrupt_shadow = 0;
    control.inject_event = 0;
    control.nested_cr3 = nested::empty_root().as_u64();
    control.rflags &= !(RFLAGS_IF | RFLAGS_TF);
    control.dr7 = DR7_CLEAR;
    control.tlb_control = TLB_FLUSH_ALL;
    hardware.flush_by_entry(control, area.cpu.control_phys);
    (
        (control.intercept_misc1, control.virtual_interrupt, control.interrupt_shadow, control.inject_event),
        (control.exit_code, control.exit_info1, control.exit_info2, control.exit_event),
        (control.nested_cr3, control.rflags, control.dr7),
    ) = before;
}

/// Has the window show the page at `phys`. Returns `false` if the page is beyond memory or hidden: the
/// processor would write its guest's state there, round the nested tables.
fn show(area: &mut Area, hardware: &mut impl Hardware, phys: u64) -> bool {
    /// Present, writable, accessed and dirty (APM vol. 2, 5.4).
    const WRITABLE: u64 = 1 << 0 | 1 << 1 | 1 << 5 | 1 << 6;
    if area.own.block_phys == phys {
        return true;
    }
    if !nested::is_identity::<super::Svm>(GuestPhys::new(phys)) {
        return false;
    }
    let gate = &area.cpu.gate;
    let entry = core::ptr::with_exposed_provenance_mut::<u64>(gate.window_entry_virt as usize);
    // SAFETY: the driver has mapped the table with this entry, which no other code writes; the page that it
    // maps is used through `block` and by the world switch only.
    unsafe { entry.write_volatile(phys | WRITABLE) };
    hardware.forget_page(gate.window_virt);
    area.own.block_phys = phys;
    true
}

/// Has the window show nothing.
pub(super) fn hide(area: &mut Area, hardware: &mut impl Hardware) {
    let gate = &area.cpu.gate;
    let entry = core::ptr::with_exposed_provenance_mut::<u64>(gate.window_entry_virt as usize);
    // SAFETY: as in `show`.
    unsafe { entry.write_volatile(0) };
    hardware.forget_page(gate.window_virt);
    area.own.block_phys = NO_BLOCK;
}

/// Returns the physical address of a virtual one of the system's, by its page tables; `None` where nothing is
/// mapped. The caller calls [`hide`] after the last one.
pub(super) fn translate(area: &mut Area, hardware: &mut impl Hardware, virt: u64) -> Option<u64> {
    /// Bits of an entry (APM vol. 2, 5.3 and 5.4).
    const PRESENT: u64 = 1 << 0;
    const LARGE: u64 = 1 << 7;
    const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
    const CR4_LA57: u64 = 1 << 12;
    let mut shift = if area.control.cr4 & CR4_LA57 != 0 { 48 } else { 39 };
    let mut table = area.control.cr3 & ADDRESS;
    loop {
        let entry = read_physical(area, hardware, table | (virt >> shift & 511) << 3)?;
        let offset = (1 << shift) - 1;
        if entry & PRESENT == 0 {
            return None;
        }
        if shift == 12 || shift <= 30 && entry & LARGE != 0 {
            return Some(entry & ADDRESS & !offset | virt & offset);
        }
        (table, shift) = (entry & ADDRESS, shift - 9);
    }
}

/// Reads an aligned word of the system's memory; `None` if it is beyond memory or hidden. The caller calls
/// [`hide`] after the last one.
pub(super) fn read_physical(area: &mut Area, hardware: &mut impl Hardware, phys: u64) -> Option<u64> {
    if !show(area, hardware, phys & !0xFFF) {
        return None;
    }
    let word = area.cpu.gate.window_virt as usize + (phys & 0xFF8) as usize;
    // SAFETY: an aligned word in the page that the window shows, which is the system's memory: any bits are a
    // value.
    Some(unsafe { core::ptr::with_exposed_provenance::<u64>(word).read_volatile() })
}

/// Fields of the block that the window shows.
struct Shown {
    intercepts: u32,
    asid: u32,
    nested_control: u64,
    virtual_interrupt: u64,
}

/// Returns the control block in the window.
pub(super) fn block(area: &Area) -> *mut Vmcb {
    core::ptr::with_exposed_provenance_mut(area.cpu.gate.window_virt as usize)
}

fn window(area: &Area) -> Shown {
    let block = block(area);
    // SAFETY: the driver has made a page-table entry for this address, and `show` has filled it with a page
    // of memory. Other CPUs do not run this block; KVM, on this one, does not change it meanwhile.
    unsafe {
        Shown {
            intercepts: (&raw const (*block).intercept_misc1).read_volatile(),
            asid: (&raw const (*block).asid).read_volatile(),
            nested_control: (&raw const (*block).nested_control).read_volatile(),
            virtual_interrupt: (&raw const (*block).virtual_interrupt).read_volatile(),
        }
    }
}
