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

use mercury_abi::code::Code;
use mercury_abi::facts::CpuFacts;
use mercury_abi::gate::{KEEP_GIF_CLEAR, KEEP_SVME};
use mercury_abi::shared::ExitReason;
use mercury_preflight::bits::{cr4, efer};

use super::shadow::{self, Fault as ShadowFault, Prepared};
use super::vmcb::{
    INTERCEPT_ALL_EVENTS, INTERCEPT_CLGI, INTERCEPT_INVLPGA, INTERCEPT_IRET, INTERCEPT_MISC2,
    INTERCEPT_MISC2_SHARED, INTERCEPT_NMI, INTERCEPT_SHUTDOWN, INTERCEPT_STGI, INTERCEPT_VMSAVE,
    NESTED_CONTROL_ENCRYPTED, TLB_FLUSH_ALL, TLB_KEEP, VIRTUAL_APIC, VIRTUAL_INTERRUPT, VIRTUAL_MASKING,
    Vmcb, event, exit_code,
};
use super::{Area, Own, Svm, exits};
use crate::address::{GuestPhys, HostPhys};
use crate::exit::{Answer, Fault};
use crate::host::entry::Next;
use crate::paging::table::Depth;
use crate::snapshot::live::{self, WritePermit};
use crate::snapshot::system_memory::{page, with_memory};
use crate::vendor::Vendor;
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
            // It writes where the snapshot's tables do not see it.
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

/// Answers an exit of the system's guest that runs on a shadow. Either the shadow needed it, or KVM gets
/// it, as the world switch would have left it (APM vol. 2, 15.6).
pub fn exited(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    area.own.guest_exited = 0;
    let block = block(area);
    // SAFETY: a control block of KVM's in the window; no other code uses it before KVM goes on.
    let (code, qualification, address) =
        unsafe { ((*block).exit_code, (*block).exit_info1, (*block).exit_info2) };
    if code == exit_code::NPF {
        let write = qualification & shadow::info::WRITE != 0;
        publish::count(area, if write { ExitReason::SnapshotWrite } else { ExitReason::NestedFill });
        let bits = Svm::physical_bits(hardware);
        let fault = |area: &mut Area, _: &mut _| shadow::fault(area, address, qualification, bits);
        match with_memory(area, hardware, fault) {
            ShadowFault::Filled { wait } => {
                exit::hold_back(hardware, wait);
                return enter_again(area, qualification);
            }
            // SAFETY: as above.
            ShadowFault::Guests(qualification) => unsafe { (*block).exit_info1 = qualification },
            // As if an interrupt had come: KVM takes interrupts, and comes again. The shadow's own pages may help.
            ShadowFault::Wait => {
                // SAFETY: as above.
                unsafe {
                    ((*block).exit_code, (*block).exit_info1, (*block).exit_info2) = (exit_code::INTR, 0, 0);
                }
                area.own.shadow.expire();
            }
        }
    }
    remove_shadow(area);
    area.own.entry_state_valid = 0;
    back_from_guest(area);
    Next::Run
}

/// Lets the system go on after its VMRUN (APM vol. 2, 15.6). The world switch does the same.
fn back_from_guest(area: &mut Area) {
    area.control.dr7 = DR7_CLEAR;
    area.control.rflags &= !RFLAGS_IF;
    close(area);
}

/// Enters the guest again, with the event that its fault has interrupted (APM vol. 2, 15.7.2).
fn enter_again(area: &mut Area, qualification: u64) -> Next {
    // SAFETY: a control block of KVM's in the window; no other code uses it before the guest runs.
    let block = unsafe { &mut *block(area) };
    let event = block.exit_event;
    block.inject_event = if event & event::VALID != 0 { exits::event_again(event).unwrap_or(0) } else { 0 };
    // An absent entry is cached nowhere.
    let cached = qualification & shadow::info::PRESENT != 0;
    block.tlb_control = if cached { TLB_FLUSH_ALL } else { TLB_KEEP };
    block.clean = 0;
    area.own.enter_guest = 1;
    Next::Run
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

/// Emulates VMSAVE of the system above beneath a snapshot or a dirty log, so that the page is copied or
/// noted first. The world switch has saved the state (APM vol. 2, 15.5.2 and VMSAVE).
pub fn save_state(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    publish::count(area, ExitReason::Other);
    with_memory(area, hardware, |area, _| save_to_memory(area))
}

fn save_to_memory(area: &Area) -> Answer {
    let to = area.control.rax;
    if !to.is_multiple_of(4096) || !nested::is_identity::<Svm>(GuestPhys::new(to)) {
        return Answer::Inject(Fault::GeneralProtection);
    }
    match permit_write_mapped(area, to) {
        Some(WritePermit::Granted) => {}
        Some(WritePermit::Wait) => return Answer::Retry,
        _ => return Answer::Inject(Fault::GeneralProtection),
    }
    let to = page::<Vmcb>(HostPhys::new(to));
    let from = &area.control;
    // SAFETY: memory of the system's that the hypervisor's tables map while a snapshot is live; the system gave it to
    // the processor for this.
    unsafe {
        ((*to).fs, (*to).gs, (*to).tr, (*to).ldtr) = (from.fs, from.gs, from.tr, from.ldtr);
        (*to).syscall = from.syscall;
    }
    Answer::Skip
}

/// Prepares a write that passes round the tables: the snapshot keeps the page's content, or the dirty log
/// notes the page.
fn permit_write(area: &mut Area, hardware: &mut impl Hardware, address: u64) -> Option<WritePermit> {
    with_memory(area, hardware, |area, _| permit_write_mapped(area, address))
}

/// Does the same with the system's memory mapped.
fn permit_write_mapped(area: &Area, address: u64) -> Option<WritePermit> {
    let mut guard = Svm::tables().lock()?;
    guard.as_mut().map(|nested| nested.live.permit_write(GuestPhys::new(address), area.cpu.on_snapshot))
}

/// Emulates CLGI of the system above, beneath a snapshot or a dirty log.
pub fn clear_gif(area: &mut Area) -> Answer {
    publish::count(area, ExitReason::Other);
    close(area);
    Answer::Skip
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
    // SAFETY: the driver has mapped the table with this entry, which no other code writes; the page that it maps is used
    // through `block` and by the world switch only.
    unsafe { entry.write_volatile(phys | WRITABLE) };
    hardware.forget_page(gate.window_virt);
    area.own.block_phys = phys;
    true
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
    // SAFETY: the driver has made a page-table entry for this address, and `show` has filled it with a page of memory.
    // Other CPUs do not run this block; KVM, on this one, does not change it meanwhile.
    unsafe {
        Shown {
            intercepts: (&raw const (*block).intercept_misc1).read_volatile(),
            asid: (&raw const (*block).asid).read_volatile(),
            nested_control: (&raw const (*block).nested_control).read_volatile(),
            virtual_interrupt: (&raw const (*block).virtual_interrupt).read_volatile(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::{Attached, LINUX_EFER};
    use crate::svm::vmcb::{INTERCEPT_MISC1, exit_code};

    const RCX: usize = 1;
    const RDX: usize = 2;
    const RSI: usize = 6;
    const KVMS_PAGE: u64 = 0x7_7000;
    const BLOCK: u64 = 0x12_3000;

    /// A CPU with a window that shows KVM's block.
    struct Host {
        cpu: Attached,
        block: Box<Vmcb>,
        entry: Box<u64>,
    }

    impl Host {
        fn new() -> Self {
            nested::tests::install::<super::super::Svm>();
            let mut host = Self { cpu: Attached::new(), block: Vmcb::zeroed(), entry: Box::new(0) };
            (host.block.asid, host.block.intercept_misc1) = (3, INTERCEPT_NMI);
            let gate = &mut host.cpu.area.cpu.gate;
            gate.window_virt = (&raw mut *host.block).expose_provenance() as u64;
            gate.window_entry_virt = (&raw mut *host.entry).expose_provenance() as u64;
            host.allow(1);
            host
        }

        /// Returns a system that has set EFER.SVME.
        fn with_svm() -> Self {
            let mut host = Self::new();
            assert_eq!(host.write(msr::EFER, LINUX_EFER | msr::EFER_SVME), Next::Run);
            assert_eq!(host.write(msr::VM_HSAVE_PA, KVMS_PAGE), Next::Run);
            host
        }

        fn allow(&mut self, may: u32) {
            self.cpu.area.shared().kvm_may = may;
        }

        fn exit(&mut self, code: u64) -> Next {
            let next = self.cpu.exit(code);
            settle(&mut self.cpu.area, next);
            next
        }

        fn write(&mut self, index: u32, value: u64) -> Next {
            *self.cpu.register(0) = value & 0xFFFF_FFFF;
            *self.cpu.register(RDX) = value >> 32;
            *self.cpu.register(RCX) = u64::from(index);
            self.cpu.area.control.exit_info1 = 1;
            self.exit(exit_code::MSR)
        }

        fn read(&mut self, index: u32) -> u64 {
            *self.cpu.register(RCX) = u64::from(index);
            self.cpu.area.control.exit_info1 = 0;
            assert_eq!(self.exit(exit_code::MSR), Next::Run);
            *self.cpu.register(0) | *self.cpu.register(RDX) << 32
        }

        fn run(&mut self, block: u64) -> Next {
            *self.cpu.register(0) = block;
            self.exit(exit_code::VMRUN)
        }

        /// Does the work of the world switch after a guest's exit.
        fn guest_exits(&mut self) {
            let Area { own, control, .. } = &mut *self.cpu.area;
            (own.enter_guest, own.gif_is_clear) = (0, 1);
            control.virtual_interrupt |= VIRTUAL_MASKING;
            control.intercept_misc1 |= INTERCEPT_NMI;
            control.intercept_misc2 |= INTERCEPT_STGI;
        }
    }

    #[test]
    fn kvm_reads_what_it_wrote_and_the_processor_has_ours() {
        let mut host = Host::new();
        assert_eq!(host.read(msr::EFER), LINUX_EFER, "SVM is free");
        assert_eq!(host.cpu.area.control.intercept_misc2, INTERCEPT_MISC2);
        let mut host = Host::with_svm();
        assert_eq!(host.read(msr::EFER), LINUX_EFER | msr::EFER_SVME);
        assert_eq!(host.read(msr::VM_HSAVE_PA), KVMS_PAGE);
        assert_eq!(host.cpu.hardware.msrs[&msr::VM_HSAVE_PA], 0x7000, "the hypervisor's");
        assert_eq!(host.cpu.area.control.intercept_misc2, INTERCEPT_MISC2_SHARED);
        assert_eq!(host.cpu.area.control.intercept_misc1, INTERCEPT_MISC1 & !INTERCEPT_INVLPGA);
        assert_eq!(host.cpu.area.own.quick_guests, 1);
        // The last virtual machine has gone: no wish to detach.
        assert_eq!(host.write(msr::VM_HSAVE_PA, 0), Next::Run);
        assert_eq!(host.write(msr::EFER, LINUX_EFER), Next::Run);
        assert_eq!(host.cpu.area.control.efer, LINUX_EFER | msr::EFER_SVME, "the hypervisor's");
        assert_eq!(host.cpu.area.control.intercept_misc2, INTERCEPT_MISC2);
        assert_eq!(host.cpu.area.control.intercept_misc1, INTERCEPT_MISC1);
        assert_eq!(host.cpu.area.own.quick_guests, 0);
    }

    #[test]
    fn without_kvm_svm_shows_as_in_use_and_to_clear_it_is_to_leave() {
        let mut host = Host::new();
        host.allow(0);
        assert_eq!(host.read(msr::EFER), LINUX_EFER | msr::EFER_SVME);
        // A write of what was read turns nothing on.
        assert_eq!(host.write(msr::EFER, LINUX_EFER | msr::EFER_SVME), Next::Run);
        assert!(!has_svm(&host.cpu.area));
        assert_eq!(host.write(msr::EFER, LINUX_EFER), Next::Leave);
    }

    #[test]
    fn a_kernel_that_crashes_beside_kvm_leaves_with_svm_on() {
        let mut host = Host::with_svm();
        host.allow(0);
        assert_eq!(host.write(msr::VM_HSAVE_PA, 0), Next::Leave);
        assert_eq!(host.cpu.area.cpu.gate.outward.svm, KEEP_SVME);
        assert_eq!(host.cpu.hardware.msrs[&msr::VM_HSAVE_PA], KVMS_PAGE);
    }

    #[test]
    fn only_the_driver_learns_that_the_cpu_is_attached() {
        use crate::quick::Quick;
        use crate::svm::quick::answer;
        const ATTACHED: u64 = mercury_abi::gate::EFER_ATTACHED;
        let mut host = Host::with_svm();
        assert_eq!(host.read(msr::EFER) & ATTACHED, 0);
        *host.cpu.register(RCX) = u64::from(msr::EFER);
        let (area, hardware) = (&mut host.cpu.area, &mut host.cpu.hardware);
        (area.control.exit_code, area.control.exit_info1) = (exit_code::MSR, 0);
        assert_eq!(answer(area, hardware), Quick::Slow, "anybody");
        area.cpu.gate.outward.registers[RSI] = mercury_abi::gate::HYPERCALL_MAGIC;
        area.control.cpl = 3;
        assert_eq!(answer(area, hardware), Quick::Slow, "user mode");
        area.control.cpl = 0;
        let rip = area.control.rip;
        assert_eq!(answer(area, hardware), Quick::Run);
        assert_eq!(area.control.rip, rip + 2);
        let told = *host.cpu.register(0) | *host.cpu.register(RDX) << 32;
        assert_eq!(told, LINUX_EFER | msr::EFER_SVME | ATTACHED);
    }

    #[test]
    fn the_driver_gets_the_mode_on_the_long_way_as_well() {
        const ATTACHED: u64 = mercury_abi::gate::EFER_ATTACHED;
        let mut host = Host::new();
        host.allow(0);
        host.cpu.area.cpu.on_snapshot = 1;
        assert_eq!(host.read(msr::EFER), LINUX_EFER | msr::EFER_SVME);
        *host.cpu.register(RSI) = mercury_abi::gate::HYPERCALL_MAGIC;
        assert_eq!(host.read(msr::EFER), LINUX_EFER | msr::EFER_SVME | ATTACHED);
    }

    #[test]
    fn a_guest_is_entered_on_its_own_block() {
        let mut host = Host::with_svm();
        let rip = host.cpu.area.control.rip;
        assert_eq!(host.run(BLOCK), Next::Run);
        assert_eq!((host.cpu.area.own.enter_guest, host.cpu.area.own.block_phys), (1, BLOCK));
        assert_eq!(*host.entry & 0x000F_FFFF_FFFF_F003, BLOCK | 3, "present");
        assert_eq!((host.cpu.area.control.rip, host.cpu.area.control.rax), (rip + 3, BLOCK));
        assert_eq!(host.cpu.area.shared().exits[ExitReason::GuestRun as usize], 1);
        assert_eq!(host.cpu.area.control.tlb_control, 0);
    }

    #[test]
    fn what_is_no_block_faults() {
        let mut host = Host::with_svm();
        for address in [BLOCK + 8, nested::tests::BEYOND, nested::tests::HIDDEN.as_u64()] {
            let rip = host.cpu.area.control.rip;
            assert_eq!(host.run(address), Next::Run);
            assert_eq!(host.cpu.area.control.inject_event, event::GENERAL_PROTECTION, "{address:#x}");
            assert_eq!((host.cpu.area.control.rip, host.cpu.area.own.enter_guest), (rip, 0));
            assert_eq!(*host.entry, 0);
            host.cpu.enter();
        }
    }

    #[test]
    fn without_svm_its_instructions_are_undefined() {
        for code in [exit_code::VMRUN, exit_code::STGI, exit_code::CLGI] {
            let mut host = Host::new();
            *host.cpu.register(0) = BLOCK;
            assert_eq!(host.exit(code), Next::Run);
            assert_eq!(host.cpu.area.control.inject_event, event::INVALID_OPCODE);
        }
    }

    #[test]
    fn the_system_and_its_guest_never_share_an_identifier() {
        let mut host = Host::with_svm();
        for asid in [15, 14, 15] {
            host.block.asid = asid;
            assert_eq!(host.run(BLOCK), Next::Run);
            assert_eq!(host.cpu.area.control.asid, 29 - asid);
            assert_eq!(host.cpu.area.control.tlb_control, TLB_FLUSH_ALL);
        }
        // Two identifiers in all: one for each, if they do not want the same one.
        let mut host = Host::with_svm();
        (host.cpu.area.own.asids, host.cpu.area.control.asid, host.block.asid) = ([1, 0], 1, 1);
        assert_eq!(host.run(BLOCK), Next::Leave);
    }

    #[test]
    fn an_encrypted_guest_and_one_with_avic_run_natively() {
        runs_natively(|block| block.nested_control = 3);
        runs_natively(|block| block.virtual_interrupt = VIRTUAL_APIC);
    }

    fn runs_natively(make: fn(&mut Vmcb)) {
        let mut host = Host::with_svm();
        make(&mut host.block);
        let rip = host.cpu.area.control.rip;
        assert_eq!(host.run(BLOCK), Next::Leave);
        let outward = &host.cpu.area.cpu.gate.outward;
        assert_eq!((outward.rip, outward.registers[0]), (rip, BLOCK), "VMRUN is executed again");
        assert_eq!(outward.svm, KEEP_SVME | KEEP_GIF_CLEAR);
        assert_eq!(host.cpu.area.shared().left_because, Code::GuestUnsupported as u64);
    }

    #[test]
    fn what_vmrun_takes_from_the_processor_is_what_kvm_has() {
        let as_natively = |host: &mut Host| is_as_natively(&host.cpu.area, &mut host.cpu.hardware);
        let differ: [fn(&mut Host); 4] = [
            |host| host.cpu.area.own.guest_efer &= !efer::NXE,
            |host| host.cpu.area.control.cr4 |= cr4::LA57,
            |host| host.cpu.area.control.g_pat ^= 1 << 8,
            |host| {
                host.cpu.area.own.around_guest |= LENT;
                host.cpu.hardware.msrs.insert(msr::SPEC_CTRL, 1);
            },
        ];
        for (number, differ) in differ.into_iter().enumerate() {
            let mut host = Host::with_svm();
            assert!(as_natively(&mut host));
            differ(&mut host);
            assert!(!as_natively(&mut host), "{number}");
        }
        // Whatever the system sets of it, and stays attached, the processor has as well.
        let mut host = Host::with_svm();
        assert_eq!(host.write(msr::PAT, crate::model::LINUX_PAT ^ 1 << 24), Next::Run);
        assert_eq!(host.write(msr::EFER, LINUX_EFER | msr::EFER_SVME | efer::AUTOIBRS), Next::Run);
        assert!(as_natively(&mut host));
        assert_eq!(host.run(BLOCK), Next::Run);
        assert_eq!(host.write(msr::EFER, LINUX_EFER & !efer::NXE | msr::EFER_SVME), Next::Leave);
    }

    #[test]
    fn an_nmi_waits_for_stgi() {
        let mut host = Host::with_svm();
        assert_eq!(host.run(BLOCK), Next::Run);
        host.guest_exits();
        assert_eq!(host.exit(exit_code::NMI), Next::Run);
        assert_eq!((host.cpu.hardware.nmis_taken, host.cpu.area.control.inject_event), (1, 0));
        assert_eq!(host.exit(exit_code::STGI), Next::Run);
        let control = &host.cpu.area.control;
        assert_eq!(control.inject_event, NMI);
        assert_eq!(control.virtual_interrupt, 0);
        assert_eq!(control.intercept_misc1 & INTERCEPT_NMI, 0);
        assert_eq!(control.intercept_misc2, INTERCEPT_MISC2_SHARED);
        // The next one finds nothing.
        host.cpu.enter();
        host.guest_exits();
        assert_eq!(host.exit(exit_code::STGI), Next::Run);
        assert_eq!(host.cpu.area.control.inject_event, 0);
    }

    #[test]
    fn while_a_snapshot_is_kept_nmis_go_on_to_exit() {
        let mut host = Host::with_svm();
        host.cpu.area.control.intercept_misc1 |= INTERCEPT_NMI | INTERCEPT_SHUTDOWN;
        host.guest_exits();
        assert_eq!(host.exit(exit_code::STGI), Next::Run);
        assert_ne!(host.cpu.area.control.intercept_misc1 & INTERCEPT_NMI, 0);
    }

    #[test]
    fn a_detach_beneath_kvm_leaves_it_everything() {
        let mut host = Host::with_svm();
        *host.cpu.register(0) = mercury_abi::gate::Hypercall::Detach as u64;
        *host.cpu.register(RCX) = mercury_abi::gate::HYPERCALL_MAGIC;
        let (rip, rflags) = (host.cpu.area.control.rip, host.cpu.area.control.rflags);
        let root = host.cpu.area.control.nested_cr3;
        assert_eq!(host.exit(exit_code::VMMCALL), Next::Leave);
        assert_eq!(host.cpu.area.control.nested_cr3, root);
        assert_eq!(host.cpu.area.control.exit_code, exit_code::VMMCALL, "not the flush's own");
        let outward = &host.cpu.area.cpu.gate.outward;
        assert_eq!((outward.svm, outward.rip, outward.rflags), (KEEP_SVME, rip + 3, rflags));
        assert_eq!(host.cpu.hardware.msrs[&msr::VM_HSAVE_PA], KVMS_PAGE);
        assert_eq!(host.cpu.hardware.flushes, 1, "the system's own identifier may be a guest's next");
        assert_eq!(host.cpu.area.control.intercept_misc1 & INTERCEPT_ALL_EVENTS, 0);
    }

    /// KVM as the manual has it, and who must see its GIF.
    #[derive(Default)]
    struct Manual {
        svm: bool,
        gif_is_clear: bool,
        /// CLGI exited, or a guest did.
        is_seen: bool,
        held: bool,
        snapshot: bool,
    }

    impl Host {
        /// Does the next step of KVM or of the rest of the system, if that can be done now.
        fn step(&mut self, manual: &mut Manual, step: u8) {
            match step {
                0 if !manual.gif_is_clear => {
                    self.write(msr::EFER, LINUX_EFER | msr::EFER_SVME);
                    manual.svm = true;
                }
                1 if !manual.gif_is_clear => {
                    self.write(msr::EFER, LINUX_EFER);
                    manual.svm = false;
                }
                2 if manual.svm => {
                    self.block.inject_event = event::VALID | 0x30;
                    self.run(BLOCK);
                    assert_eq!(self.cpu.area.own.enter_guest == 0, manual.held);
                    if manual.held {
                        let block = &self.block;
                        assert_eq!(
                            (block.exit_code, block.exit_event),
                            (exit_code::NMI, event::VALID | 0x30)
                        );
                        assert_eq!(block.inject_event, 0);
                    } else {
                        self.guest_exits();
                    }
                    (manual.gif_is_clear, manual.is_seen) = (true, true);
                }
                3 if manual.svm => {
                    if self.cpu.area.control.intercept_misc2 & INTERCEPT_STGI != 0 {
                        self.exit(exit_code::STGI);
                        assert_eq!(self.cpu.area.control.inject_event == NMI, manual.held);
                    }
                    (manual.gif_is_clear, manual.held) = (false, false);
                }
                4 if manual.gif_is_clear && manual.is_seen => {
                    let taken = self.cpu.hardware.nmis_taken;
                    self.exit(exit_code::NMI);
                    assert_eq!(self.cpu.hardware.nmis_taken, taken + 1);
                    manual.held = true;
                }
                5 if manual.svm => {
                    let exits = self.cpu.area.control.intercept_misc2 & INTERCEPT_CLGI != 0;
                    if exits {
                        self.exit(exit_code::CLGI);
                        assert_eq!(self.cpu.area.control.inject_event, 0);
                    }
                    manual.is_seen = exits || manual.gif_is_clear && manual.is_seen;
                    manual.gif_is_clear = true;
                }
                // The first write to a page: without a snapshot KVM makes none where CLGI is not seen.
                6 if manual.snapshot || !manual.gif_is_clear => {
                    (self.cpu.area.control.exit_info1, self.cpu.area.control.exit_info2) =
                        (NPF_WRITE, nested::tests::UNTOUCHED);
                    assert_eq!(self.exit(exit_code::NPF), Next::Run);
                }
                // By an interrupt, which waits for GIF.
                7 | 8 if !manual.gif_is_clear => {
                    self.cpu.area.cpu.on_snapshot = if step == 7 { live::ON_SNAPSHOT } else { 0 };
                    manual.snapshot = step == 7;
                    *self.cpu.register(0) = mercury_abi::gate::Hypercall::Ping as u64;
                    *self.cpu.register(RCX) = mercury_abi::gate::HYPERCALL_MAGIC;
                    self.exit(exit_code::VMMCALL);
                }
                _ if !manual.gif_is_clear => {
                    assert_eq!(self.read(msr::EFER) & msr::EFER_SVME != 0, manual.svm);
                }
                _ => {}
            }
            self.cpu.enter();
        }

        /// Compares with the manual. An entry of the system sets GIF, but no event reaches it, whatever has
        /// exited since CLGI.
        fn agrees(&self, manual: &Manual) {
            let control = &self.cpu.area.control;
            let held_back = manual.gif_is_clear && manual.is_seen;
            assert_eq!(control.virtual_interrupt & VIRTUAL_MASKING != 0, held_back);
            assert_eq!(control.intercept_misc1 & INTERCEPT_NMI != 0, held_back);
            assert_eq!(control.intercept_misc2 & INTERCEPT_STGI != 0, !manual.svm || held_back);
            assert!(!manual.snapshot || held_back || !manual.gif_is_clear, "an exit would open it");
            let beneath = INTERCEPT_CLGI | INTERCEPT_VMSAVE;
            let wanted = if !manual.svm || manual.snapshot { beneath } else { 0 };
            assert_eq!(control.intercept_misc2 & beneath, wanted);
            assert_eq!(control.intercept_misc2 & INTERCEPT_VMLOAD != 0, !manual.svm);
            assert_eq!(control.intercept_misc2 & INTERCEPT_MISC2_SHARED, INTERCEPT_MISC2_SHARED);
            assert_eq!(control.intercept_misc1 & INTERCEPT_INVLPGA != 0, !manual.svm);
            assert!(control.efer & msr::EFER_SVME != 0);
            let quick = manual.svm && !manual.snapshot;
            assert_eq!(
                self.cpu.area.own.quick_guests != 0,
                quick,
                "the world switch answers nothing by itself"
            );
            // What a native KVM would go on with, if the CPU left here.
            let kept = keep(self.cpu.area.own.guest_efer, self.cpu.area.own.gif_is_clear != 0);
            assert_eq!(kept == KEEP_SVME | KEEP_GIF_CLEAR, manual.svm && held_back);
        }
    }

    const NPF_WRITE: u64 = 1 << 1;
    const INTERCEPT_VMLOAD: u32 = 1 << 2;

    /// KVM loads its guest's FS, GS and TR between CLGI and VMRUN, and meets pages there that were not
    /// written since the instant. No event may strike then.
    #[test]
    fn beneath_a_snapshot_gif_stays_0_from_clgi_to_vmrun() {
        let mut host = Host::with_svm();
        let mut manual = Manual { svm: true, ..Manual::default() };
        for (step, held_back) in
            [(7, false), (5, true), (6, true), (4, true), (6, true), (2, true), (3, false)]
        {
            host.step(&mut manual, step);
            host.agrees(&manual);
            assert_eq!(host.cpu.area.control.virtual_interrupt & VIRTUAL_MASKING != 0, held_back, "{step}");
        }
        assert_eq!(host.cpu.area.own.nmi_held, 0);
    }

    #[test]
    fn what_ends_a_guest_at_once_flushes_what_kvm_wanted_flushed() {
        let mut host = Host::with_svm();
        host.cpu.area.cpu.on_snapshot = live::ON_SNAPSHOT;
        for (wanted, flushed) in [(TLB_KEEP, TLB_KEEP), (3, TLB_FLUSH_ALL)] {
            host.cpu.area.control.tlb_control = TLB_KEEP;
            host.block.tlb_control = wanted;
            assert_eq!(host.exit(exit_code::CLGI), Next::Run);
            assert_eq!(host.exit(exit_code::NMI), Next::Run);
            assert_eq!(host.run(BLOCK), Next::Run);
            assert_eq!((host.block.exit_code, host.cpu.area.own.enter_guest), (exit_code::NMI, 0));
            assert_eq!(host.cpu.area.control.tlb_control, flushed);
            assert_eq!(host.exit(exit_code::STGI), Next::Run);
            assert_eq!(host.cpu.enter(), NMI);
        }
    }

    /// A collection of the log, or a snapshot, has this CPU forget translations: what a shadow lets through goes with them.
    #[test]
    fn a_shadow_expires_with_translations() {
        const RDI: usize = 7;
        let mut host = Host::with_svm();
        host.cpu.area.cpu.on_snapshot = live::ON_LOG;
        *host.cpu.register(0) = mercury_abi::gate::Hypercall::Snapshot as u64;
        *host.cpu.register(RCX) = mercury_abi::gate::HYPERCALL_MAGIC;
        *host.cpu.register(RDI) = mercury_abi::snapshot::SnapshotCall::Leave as u64;
        let mut expired = shadow::Shadow::default();
        expired.expire();
        assert_ne!(host.cpu.area.own.shadow, expired);
        assert_eq!(host.cpu.exit(exit_code::VMMCALL), Next::Run);
        assert_eq!((host.cpu.area.own.shadow, host.cpu.area.control.tlb_control), (expired, TLB_FLUSH_ALL));
    }

    /// A rollback that fails leaves the NMI that was to fetch this CPU; it is no better than another.
    #[test]
    fn an_nmi_that_fetches_nobody_waits_for_stgi() {
        let mut host = Host::with_svm();
        host.cpu.area.cpu.on_snapshot = live::ON_SNAPSHOT;
        host.cpu.area.control.intercept_misc1 |= INTERCEPT_NMI | INTERCEPT_SHUTDOWN;
        host.cpu.area.own.quick_guests = 0;
        assert_eq!(host.exit(exit_code::CLGI), Next::Run);
        assert_eq!(host.exit(exit_code::NMI), Next::Run);
        assert_eq!(host.cpu.area.control.intercept_misc1 & INTERCEPT_NMI, INTERCEPT_NMI);
        assert_eq!((host.cpu.area.own.nmi_held, host.cpu.hardware.nmis_taken), (1, 1));
    }

    proptest! {
        /// Intercepts, permission maps, what is to be injected and when, windows for interrupts and NMIs, what is to be
        /// flushed, the guest's registers: the processor has them as KVM has made them.
        #[test]
        fn a_block_is_entered_as_kvm_has_made_it(words in prop::collection::vec(any::<u64>(), size_of::<Vmcb>() / 8)) {
            let mut host = Host::with_svm();
            let bytes = |block: &Vmcb| -> Vec<u64> {
                // SAFETY: a block is made of integers, without gaps.
                unsafe { core::slice::from_raw_parts(core::ptr::from_ref(block).cast(), words.len()) }.to_vec()
            };
            // SAFETY: likewise; any bits are a value.
            unsafe { core::ptr::copy_nonoverlapping(words.as_ptr(), (&raw mut *host.block).cast(), words.len()) };
            host.block.asid = 3;
            host.block.nested_control &= !u64::from(NESTED_CONTROL_ENCRYPTED);
            host.block.virtual_interrupt &= !VIRTUAL_APIC;
            // What the processor keeps of a block it reads anew: another one may have been here.
            let mut wanted = bytes(&host.block);
            wanted[core::mem::offset_of!(Vmcb, clean) / 8] = 0;
            prop_assert_eq!(host.run(BLOCK), Next::Run);
            prop_assert_eq!(host.cpu.area.own.enter_guest, 1);
            prop_assert_eq!(bytes(&host.block), wanted);
        }

        /// Whatever KVM and the rest of the system do: what the processor is told is what they would have natively.
        #[test]
        fn gif_and_intercepts_agree(steps in prop::collection::vec(0..10u8, 1..40)) {
            let mut host = Host::new();
            let mut manual = Manual::default();
            for step in steps {
                host.step(&mut manual, step);
                host.agrees(&manual);
            }
        }
    }
}
