//! Live state of a native CPU into the control block, and the guest's state back into the processor.
//!
//! State that VMRUN and #VMEXIT do not touch stays live throughout: FS, GS, TR, LDTR, syscall MSRs, DR0–3,
//! XCR0, XSS, x87 and vector registers, TSC_AUX and user CET state (HARDWARE ). The hypervisor
//! changes only TR and its companions, with VMSAVE and VMLOAD around its own work.

use mercury_abi::code::Code;
use mercury_abi::facts::CpuFacts;
use mercury_abi::gate::DescriptorTable;

use mercury_preflight::bits::{cpuid, cr4};

use super::Area;
use super::guests;
use super::msr::PERMISSION_MAP;
use super::refusal;
use super::vmcb::{self, INTERCEPT_MISC1, INTERCEPT_MISC2, Segment, TLB_FLUSH_ALL, Vmcb};
use crate::address::HostPhys;
use crate::x86::{CR4_PGE, Hardware, msr};
use crate::{native, nested};

/// Feature bits in [`crate::cpu::Cpu::features`].
pub mod feature {
    /// The processor saves the next RIP at instruction intercepts (CPUID 8000_000Ah EDX bit 3).
    pub const NEXT_RIP: u32 = 1 << 0;
    /// SPEC_CTRL is virtualized (EDX bit 20): VMRUN loads it from the control block.
    pub const VIRTUAL_SPEC_CTRL: u32 = 1 << 1;
    /// Shadow stacks (CPUID 7 ECX bit 7): VMRUN loads S_CET, SSP and ISST_ADDR. EDX bit 19 only adds a check
    /// to nested tables; either is taken for it until it was measured.
    pub const SUPERVISOR_SHADOW_STACK: u32 = 1 << 2;
}

/// Returns the [`feature`] bits of a CPU.
#[must_use]
pub fn features(facts: &CpuFacts) -> u32 {
    let edx = facts.cpuid_8000_000a.edx;
    let bit = |position: u32, feature: u32| if edx >> position & 1 == 1 { feature } else { 0 };
    let shadow_stacks = facts.cpuid_7_0.ecx & cpuid::LEAF7_ECX_CET_SS != 0;
    let swapped = if shadow_stacks { feature::SUPERVISOR_SHADOW_STACK } else { 0 };
    bit(3, feature::NEXT_RIP)
        | bit(20, feature::VIRTUAL_SPEC_CTRL)
        | bit(19, feature::SUPERVISOR_SHADOW_STACK)
        | swapped
}

/// Fills the control block from the live processor and turns the save area on. EFER.SVME is set
/// already; FS, GS, TR, LDTR and the syscall MSRs are in the block already (VMSAVE).
///
/// # Errors
/// An MSR that the switch needs cannot be read or written.
pub fn fill(area: &mut Area, hardware: &mut impl Hardware, root: Roots) -> Result<(), Code> {
    fill_control(&mut area.control, root);
    area.control.asid = area.own.asids[0];
    fill_registers(area, hardware);
    fill_msrs(area, hardware)?;
    debug_assert!(is_fresh(area));
    if hardware.write_msr(msr::VM_HSAVE_PA, area.processor_page_phys()) {
        Ok(())
    } else {
        Err(Code::FactUnreadable)
    }
}

/// Returns true if the block is as an attach must leave it. No emulator checks these fields, and the
/// processor does: everything flushed (APM vol. 2, 15.16.1), nothing taken for unchanged (15.15), an
/// identifier that is not the hypervisor's (15.5.1). No feature without a name here is on, and the block
/// does not lie at the start of a large page (HARDWARE ).
#[must_use]
pub fn is_fresh(area: &Area) -> bool {
    let control = &area.control;
    let off = control.virtual_interrupt | control.lbr_control | control.interrupt_shadow | control.clean;
    control.tlb_control == TLB_FLUSH_ALL
        && control.asid == area.own.asids[0]
        && control.asid != 0
        && off | control.inject_event | control.exit_event == 0
        && control.nested_control == 1
        && !area.cpu.control_phys.is_multiple_of(2 << 20)
}

/// Fills the control block, and checks it for everything that VMRUN would refuse.
///
/// # Errors
/// Those of [`fill`]; [`Code::InvalidGuestState`] with the failing check in the detail.
#[inline]
pub fn attach(area: &mut Area, hardware: &mut impl Hardware) -> Result<(), Code> {
    area.own.entry_state_valid = 0;
    let roots = Roots { nested: nested::root(), msrpm: native::phys_of(&PERMISSION_MAP) };
    fill(area, hardware, roots)?;
    if !refusal::none(&area.control) {
        let check = refusal::first(&area.control);
        area.cpu.gate.detail = [check as u64, refusal::value(&area.control, check)];
        return Err(Code::InvalidGuestState);
    }
    Ok(())
}

/// Addresses of the structures that all CPUs share.
#[derive(Clone, Copy, Debug)]
pub struct Roots {
    /// Root of the nested tables, host-physical.
    pub nested: HostPhys,
    /// MSR permission map, host-physical.
    pub msrpm: HostPhys,
}

fn fill_control(control: &mut Vmcb, root: Roots) {
    control.intercept_cr_dr_exceptions = [0; 3];
    control.intercept_misc1 = INTERCEPT_MISC1;
    control.intercept_misc2 = INTERCEPT_MISC2;
    control.msrpm_phys = root.msrpm.as_u64();
    control.tsc_offset = 0;
    // The guest's identifier may still have translations of the last attachment (HARDWARE A-3).
    control.tlb_control = TLB_FLUSH_ALL;
    control.virtual_interrupt = 0;
    control.interrupt_shadow = 0;
    control.exit_event = 0;
    control.nested_control = 1;
    control.inject_event = 0;
    control.nested_cr3 = root.nested.as_u64();
    control.clean = 0;
}

fn fill_registers(area: &mut Area, hardware: &mut impl Hardware) {
    let inward = &area.cpu.gate.inward;
    let control = &mut area.control;
    control.es = inward.es;
    control.cs = inward.cs;
    control.ss = inward.ss;
    control.ds = inward.ds;
    control.gdtr = table(&area.cpu.guest_gdtr);
    control.idtr = table(&area.cpu.guest_idtr);
    control.cpl = 0;
    control.cr0 = area.cpu.guest_cr0;
    control.cr2 = hardware.cr2();
    control.cr3 = inward.cr3;
    control.cr4 = inward.cr4;
    control.dr6 = hardware.dr6();
    control.dr7 = hardware.dr7();
    control.rflags = inward.rflags;
    control.rip = inward.rip;
    control.rsp = inward.rsp;
    control.rax = 0;
}

fn fill_msrs(area: &mut Area, hardware: &mut impl Hardware) -> Result<(), Code> {
    // The driver has read EFER, and has set SVME since.
    area.own.guest_efer = area.cpu.gate.inward.efer;
    area.own.attach_efer = area.cpu.gate.inward.efer | msr::EFER_SVME;
    area.own.guest_hsave = area.cpu.gate.inward.vm_hsave_pa;
    area.control.efer = area.own.attach_efer;
    guests::attach(area);
    area.control.g_pat = hardware.read_msr(msr::PAT).ok_or(Code::FactUnreadable)?;
    if area.cpu.features & feature::SUPERVISOR_SHADOW_STACK != 0 {
        let [s_cet, isst_addr] =
            hardware.read_msrs([msr::S_CET, msr::ISST_ADDR]).ok_or(Code::FactUnreadable)?;
        (area.control.s_cet, area.control.isst_addr) = (s_cet, isst_addr);
    }
    if area.cpu.features & feature::VIRTUAL_SPEC_CTRL != 0 {
        lend_spec_ctrl(area, hardware)?;
    }
    Ok(())
}

/// Lends SPEC_CTRL to the guest, where the processor virtualizes it. VMRUN loads the guest's value from the
/// block, and the guest runs with the OR of that and the host's (APM vol. 2, 15.7, "virtualized SPEC_CTRL";
/// HARDWARE A-16). So the block gets the live value, and the host's becomes 0, here with GIF = 0. Elsewhere
/// the live register stays as it is. No emulator has the feature.
fn lend_spec_ctrl(area: &mut Area, hardware: &mut impl Hardware) -> Result<(), Code> {
    area.control.spec_ctrl = hardware.read_msr(msr::SPEC_CTRL).ok_or(Code::FactUnreadable)?;
    if !hardware.write_msr(msr::SPEC_CTRL, 0) {
        return Err(Code::FactUnreadable);
    }
    area.own.around_guest |= guests::LENT;
    debug_assert_eq!(hardware.read_msr(msr::SPEC_CTRL), Some(0));
    Ok(())
}

/// Gives SPEC_CTRL back if it is lent: at any other time the kernel's own value is in the processor.
#[inline]
fn return_spec_ctrl(area: &mut Area, hardware: &mut impl Hardware) {
    if area.own.around_guest & guests::LENT != 0 {
        area.own.around_guest &= !guests::LENT;
        let _ = hardware.write_msr(msr::SPEC_CTRL, area.control.spec_ctrl);
    }
}

pub(super) const fn table(from: &DescriptorTable) -> Segment {
    Segment { selector: 0, attributes: 0, limit: from.limit as u32, base: from.base_virt }
}

const fn put_table(to: &mut DescriptorTable, from: &Segment) {
    to.limit = from.limit as u16;
    to.base_virt = from.base;
}

/// Prepares the way out of a guest: fills the gate's outward block from the control block, and puts MSRs
/// back into the processor. CR0, DR6 and DR7 may be corrupt: values that would fault in the gate are
/// dropped. CR4 is the value that the processor reported at this exit, and may hold bits that only a later
/// kernel knows.
pub fn put_back(area: &mut Area, hardware: &mut impl Hardware) {
    put_registers_back(area);
    guests::leave(area, hardware);
    return_msrs(area, hardware);
    return_spec_ctrl(area, hardware);
}

/// Prepares the same way out where the system does not use SVM. No vector register is used, for they are
/// still the system's (see [`super::quick`]).
#[inline(always)]
pub fn put_back_without_svm(area: &mut Area, hardware: &mut impl Hardware) {
    put_registers_back(area);
    area.cpu.gate.outward.svm = 0;
    return_msrs(area, hardware);
    if area.own.around_guest != 0 {
        undo_around_guest(area, hardware);
    }
}

/// Undoes what is arranged for the runs of the system's guest.
#[inline(always)]
fn undo_around_guest(area: &mut Area, hardware: &mut impl Hardware) {
    guests::leave_without(area);
    return_spec_ctrl(area, hardware);
}

#[inline(always)]
fn put_registers_back(area: &mut Area) {
    let control = &area.control;
    let outward = &mut area.cpu.gate.outward;
    outward.cr0 = control.cr0 & 0xFFFF_FFFF;
    outward.cr2 = control.cr2;
    outward.cr3 = control.cr3;
    outward.cr4 = control.cr4;
    outward.dr6 = control.dr6 & 0xFFFF_FFFF;
    outward.dr7 = control.dr7 & 0xFFFF_FFFF;
    put_table(&mut outward.gdtr, &control.gdtr);
    put_table(&mut outward.idtr, &control.idtr);
    outward.selectors[0] = u64::from(control.es.selector);
    outward.selectors[1] = u64::from(control.cs.selector);
    outward.selectors[2] = u64::from(control.ss.selector);
    outward.selectors[3] = u64::from(control.ds.selector);
    outward.rip = control.rip;
    outward.rflags = control.rflags;
    outward.registers[0] = control.rax;
    outward.registers[4] = control.rsp;
}

/// Puts back MSRs that the guest had in its control block, but for SPEC_CTRL. Each was read from this
/// processor, or written by the system after a check, so that no write can fault.
#[inline(always)]
fn return_msrs(area: &mut Area, hardware: &mut impl Hardware) {
    if area.own.guest_efer | msr::EFER_SVME != area.own.attach_efer {
        let _ = hardware.write_msr(msr::EFER, area.own.guest_efer | msr::EFER_SVME);
    }
    // The PAT MSR needs nothing: it has had every value that the guest's PAT in the block has had
    // (see `msr::write_pat`; HARDWARE A-10).
    let _ = hardware.write_msr(msr::VM_HSAVE_PA, area.own.guest_hsave);
    if area.cpu.features & feature::SUPERVISOR_SHADOW_STACK != 0 {
        let _ = hardware.write_msr(msr::S_CET, area.control.s_cet);
        let _ = hardware.write_msr(msr::ISST_ADDR, area.control.isst_addr);
        return_user_shadow_stack(area, hardware);
    }
}

/// Puts back the shadow-stack pointer of user mode. For user mode that leaves it is in the block, and the
/// gate's IRET loads it from PL3_SSP (APM vol. 2, 18.8 and 8.9.3). In the kernel PL3_SSP holds it already.
#[inline(always)]
fn return_user_shadow_stack(area: &Area, hardware: &mut impl Hardware) {
    const SHSTK_EN: u64 = 1;
    let shadowed = area.control.cpl == 3
        && area.control.cr4 & cr4::CET != 0
        && hardware.read_msr(msr::U_CET).is_some_and(|user| user & SHSTK_EN != 0);
    if shadowed {
        let _ = hardware.write_msr(msr::PL3_SSP, area.control.ssp);
    }
}

/// Prepares the way out of a native operation that did not enter the guest. All registers are as they came
/// in, with `result` in RAX.
pub fn put_back_native(area: &mut Area, hardware: &mut impl Hardware, result: Code) {
    let inward = area.cpu.gate.inward;
    if area.control.nested_control != 0 {
        undo_fill(area, hardware);
    }
    let outward = &mut area.cpu.gate.outward;
    outward.cr0 = area.cpu.guest_cr0;
    outward.cr2 = hardware.cr2();
    outward.cr3 = inward.cr3;
    outward.cr4 = inward.cr4;
    debug_assert!(outward.cr4 & CR4_PGE != 0);
    outward.dr6 = hardware.dr6();
    outward.dr7 = hardware.dr7();
    outward.gdtr = area.cpu.guest_gdtr;
    outward.idtr = area.cpu.guest_idtr;
    outward.selectors = [inward.es, inward.cs, inward.ss, inward.ds].map(|from| u64::from(from.selector));
    outward.rip = inward.rip;
    outward.rflags = inward.rflags;
    outward.registers[0] = u64::from(result as u32);
    outward.registers[4] = inward.rsp;
    outward.svm = guests::keep(inward.efer, false);
}

/// Takes back the changes that [`fill`] made in the processor, and empties the block: values that made the
/// processor refuse it must not survive.
fn undo_fill(area: &mut Area, hardware: &mut impl Hardware) {
    let _ = hardware.write_msr(msr::VM_HSAVE_PA, area.cpu.gate.inward.vm_hsave_pa);
    return_spec_ctrl(area, hardware);
    let extended = Extended::of(&area.control);
    area.control.clear();
    extended.put(&mut area.control);
}

/// State that VMSAVE wrote and VMLOAD will need.
struct Extended {
    segments: [Segment; 4],
    syscall: [u64; 8],
}

impl Extended {
    fn of(control: &Vmcb) -> Self {
        Self { segments: [control.fs, control.gs, control.ldtr, control.tr], syscall: control.syscall }
    }

    fn put(self, control: &mut Vmcb) {
        [control.fs, control.gs, control.ldtr, control.tr] = self.segments;
        control.syscall = self.syscall;
    }
}

impl Vmcb {
    /// Zeroes the whole block.
    pub fn clear(&mut self) {
        // SAFETY: every field is an integer or an array of integers; all zeros is a valid value.
        unsafe { core::ptr::from_mut(self).write_bytes(0, 1) };
    }

    /// Returns a block of zeros.
    #[cfg(test)]
    #[must_use]
    pub fn zeroed() -> Box<Self> {
        // SAFETY: as in `clear`.
        unsafe { Box::<Self>::new_zeroed().assume_init() }
    }
}

const _: () = assert!(vmcb::TLB_KEEP == 0);
