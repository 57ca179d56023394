//! Live state of a native CPU into the VMCS, and the guest's state back into the processor.
//!
//! State that neither entry nor exit touches stays live throughout: CR2, DR0–3, DR6, KernelGSBase, the
//! SYSCALL MSRs, XCR0, XSS, x87 and vector registers, TSC_AUX, SPEC_CTRL and user CET state (SDM volume 3,
//! "Loading host state").
//!
//! An exit loads other state with the hypervisor's values, and a departure must put that back one by one:
//! limits of GDTR and IDTR, LDTR, TR with its limit, FS and GS with their bases, SYSENTER, DEBUGCTL, DR7,
//! and PAT, EFER and CET where they differ (HARDWARE I-10).

use core::sync::atomic::{Ordering, compiler_fence};

use mercury_abi::code::Code;
use mercury_abi::facts::{CpuFacts, system};
use mercury_abi::gate;
use mercury_abi::refusal::Refusal;
use mercury_preflight::bits::{cpuid, cr4, debugctl, efer};
use mercury_preflight::vmx::{self as controls, Controls, basic, entry, primary, secondary};

use super::msr::BITMAP;
use super::refusal;
use super::vmcs::{self, GUEST_VPID, UNUSABLE, activity};
use super::{Area, SystemSegment};
use crate::address::HostPhys;
use crate::host::tables::{HOST_CS, HOST_DS, HOST_TR};
use crate::paging::table::Depth;
use crate::x86::{CR4_PGE, HOST_CR0, Hardware, msr};
use crate::{native, nested};

/// Feature bits in [`crate::cpu::Cpu::features`].
pub mod feature {
    /// Shadow stacks (CPUID 7 ECX bit 7).
    pub const SHADOW_STACKS: u32 = 1 << 0;
    /// The kernel isolates its page tables: user mode has tables of its own, which do not map the gate.
    pub const ISOLATED: u32 = 1 << 1;
    /// The monitor trap flag exists.
    pub const MONITOR_TRAP: u32 = 1 << 2;
    /// NMIs can exit, so that a rollback can fetch the CPU.
    pub const ROLLBACK: u32 = 1 << 3;
}

/// CR0.NE: VMX operation fixes it (SDM, appendix A.7); PE and PG are free for an unrestricted guest.
pub const CR0_NE: u64 = 1 << 5;
/// CR4 that entry checks demand besides the guest's own.
const CR4_FIXED: u64 = cr4::VMXE;
/// Bits of CR4 whose meaning for an attached CPU is known.
pub const CR4_CARRIED: u64 = cr4::KNOWN | CR4_FIXED;

/// Returns the [`feature`] bits of a CPU.
#[must_use]
pub fn features(facts: &CpuFacts) -> u32 {
    let bit = |is: bool, feature: u32| if is { feature } else { 0 };
    bit(facts.cpuid_7_0.ecx & cpuid::LEAF7_ECX_CET_SS != 0, feature::SHADOW_STACKS)
        | bit(facts.system & system::PTI != 0, feature::ISOLATED)
        | bit(
            facts.vmx_primary_controls >> 32 & u64::from(primary::MONITOR_TRAP_FLAG) != 0,
            feature::MONITOR_TRAP,
        )
        | bit(controls::can_roll_back(facts), feature::ROLLBACK)
}

/// Takes over the facts that an attach needs. They have passed the preflight.
pub fn learn(area: &mut Area, facts: &CpuFacts) {
    area.own.controls = controls::choose(facts).unwrap_or_default();
    area.own.revision = (facts.vmx_basic & basic::REVISION) as u32;
    area.own.cr4_allowed = facts.vmx_cr4_fixed1;
}

/// Enters VMX operation and fills the VMCS; the next entry is VMLAUNCH.
///
/// # Errors
/// [`Code::StateChanged`] if there was no preflight; [`Code::InvalidGuestState`] with a [`Refusal`] in the
/// detail; [`Code::FactUnreadable`]; [`Code::SegmentUnreadable`] where TR or LDTR could not be given back.
#[inline]
pub fn attach(area: &mut Area, hardware: &mut impl Hardware) -> Result<(), Code> {
    if area.own.controls.secondary & secondary::EPT == 0 {
        return Err(Code::StateChanged);
    }
    let inward = &area.cpu.gate.inward;
    for segment in [&inward.tr, &inward.ldtr] {
        if !super::run::can_be_given_back(segment.selector) {
            area.cpu.gate.detail = [u64::from(segment.selector), 0];
            return Err(Code::SegmentUnreadable);
        }
    }
    put_inward_segments(area);
    area.own.foreign = 0;
    let live = Live::read(area, hardware).ok_or(Code::FactUnreadable)?;
    keep(area, &live);
    enter_vmx(area, hardware)?;
    fill(area, hardware, &live);
    area.cpu.gate.outward.registers[0] = 0;
    Ok(())
}

/// Notes TR and LDTR as they came in, and makes their descriptors. Mostly they are those of the last time.
#[inline]
fn put_inward_segments(area: &mut Area) {
    let (tr, ldtr) = inward_segments(&area.cpu.gate.inward);
    if tr != area.own.tr || ldtr != area.own.ldtr {
        put_changed_segments(area);
    }
}

#[cold]
#[inline(never)]
fn put_changed_segments(area: &mut Area) {
    let (tr, ldtr) = inward_segments(&area.cpu.gate.inward);
    area.host.put(&tr);
    area.host.put(&ldtr);
    area.own.tr = tr;
    area.own.ldtr = ldtr;
}

/// Returns TR and LDTR as they came in.
#[inline]
fn inward_segments(inward: &gate::Inward) -> (SystemSegment, SystemSegment) {
    let system = |from: &gate::Segment, base_virt| SystemSegment {
        selector: from.selector,
        attributes: from.attributes.into(),
        limit: from.limit,
        base_virt,
    };
    (system(&inward.tr, inward.tr_base_virt), system(&inward.ldtr, inward.ldtr_base_virt))
}

/// Executes VMXON, and makes the VMCS clear and current.
fn enter_vmx(area: &mut Area, hardware: &mut impl Hardware) -> Result<(), Code> {
    area.control.revision = area.own.revision;
    if !hardware.vmxon(area.processor_page_phys()) {
        area.cpu.gate.detail = [Refusal::VmxonFailed as u64, area.processor_page_phys()];
        return Err(Code::InvalidGuestState);
    }
    area.own.vmx_on = 1;
    area.own.launched = 0;
    area.own.failed = 0;
    hardware.vmcs_load(area.cpu.control_phys).map_err(|error| {
        area.cpu.gate.detail = [refusal::of_instruction(error) as u64, area.cpu.control_phys];
        Code::InvalidGuestState
    })
}

/// MSRs as they are before VMXON.
struct Live {
    fs_base: u64,
    gs_base: u64,
    sysenter: [u64; 3],
    debugctl: u64,
    pat: u64,
    efer: u64,
    /// S_CET and IA32_INTERRUPT_SSP_TABLE_ADDR, where they exist.
    cet: [u64; 2],
}

impl Live {
    fn read(area: &Area, hardware: &mut impl Hardware) -> Option<Self> {
        let [fs_base, gs_base, sysenter @ .., debugctl, pat, efer] = hardware.read_msrs([
            msr::FS_BASE,
            msr::GS_BASE,
            msr::SYSENTER_CS,
            msr::SYSENTER_ESP,
            msr::SYSENTER_EIP,
            msr::DEBUGCTL,
            msr::PAT,
            msr::EFER,
        ])?;
        let shadow_stacks = area.cpu.features & feature::SHADOW_STACKS != 0;
        let cet = if shadow_stacks { hardware.read_msrs([msr::S_CET, msr::ISST_ADDR])? } else { [0; 2] };
        Some(Self { fs_base, gs_base, sysenter, debugctl, pat, efer, cet })
    }
}

/// Keeps the MSRs for a departure, and for an undo from VMXON on.
fn keep(area: &mut Area, live: &Live) {
    area.own.captured = [live.fs_base, live.gs_base, live.sysenter[0], live.sysenter[1], live.sysenter[2]];
    area.own.captured_debugctl = live.debugctl;
    area.own.captured_cet = live.cet;
}

/// Fills every field that a control makes count.
fn fill(area: &mut Area, hardware: &mut impl Hardware, live: &Live) {
    area.own.host_efer = live.efer;
    area.own.host_pat = live.pat;
    area.own.awaits_window = 0;
    fill_controls(area, hardware);
    fill_host(area, hardware);
    fill_segments(area, hardware, live);
    fill_registers(area, hardware, live);
    if area.own.controls.entry & entry::LOAD_CET != 0 {
        fill_cet(hardware, live);
    }
    // This VPID and these tables may have translations of the last attachment (SDM, "Guidelines for use of
    // the INVVPID and INVEPT instructions"; HARDWARE I-21). No emulator shows it.
    hardware.flush_guests(area.own.controls.secondary & secondary::VPID != 0);
}

fn fill_controls(area: &Area, hardware: &mut impl Hardware) {
    let Controls { pin, primary, secondary, exit, entry, tertiary, .. } = area.own.controls;
    hardware.vmwrite(vmcs::PIN_CONTROLS, u64::from(pin));
    hardware.vmwrite(vmcs::PRIMARY_CONTROLS, u64::from(primary));
    hardware.vmwrite(vmcs::SECONDARY_CONTROLS, u64::from(secondary));
    hardware.vmwrite(vmcs::EXIT_CONTROLS, u64::from(exit));
    hardware.vmwrite(vmcs::ENTRY_CONTROLS, u64::from(entry));
    if primary & primary::ACTIVATE_TERTIARY != 0 {
        hardware.vmwrite(vmcs::TERTIARY_CONTROLS, tertiary);
    }
    for field in [
        vmcs::EXCEPTION_BITMAP,
        vmcs::PAGE_FAULT_MASK,
        vmcs::PAGE_FAULT_MATCH,
        vmcs::CR3_TARGET_COUNT,
        vmcs::EXIT_MSR_STORE_COUNT,
        vmcs::EXIT_MSR_LOAD_COUNT,
        vmcs::ENTRY_MSR_LOAD_COUNT,
        vmcs::ENTRY_INTERRUPTION,
        vmcs::TSC_OFFSET,
    ] {
        hardware.vmwrite(field, 0);
    }
    hardware.vmwrite(vmcs::MSR_BITMAP, native::phys_of(&BITMAP).as_u64());
    hardware.vmwrite(vmcs::EPT_POINTER, ept_pointer(nested::root(), nested::depth()));
    if secondary & secondary::VPID != 0 {
        hardware.vmwrite(vmcs::VPID, GUEST_VPID);
    }
    if secondary & secondary::XSAVES != 0 {
        hardware.vmwrite(vmcs::XSS_EXITING_BITMAP, 0);
    }
    if secondary & secondary::PCONFIG != 0 {
        hardware.vmwrite(vmcs::PCONFIG_EXITING_BITMAP, 0);
    }
    hardware.vmwrite(vmcs::VMCS_LINK_POINTER, u64::MAX);
}

/// Returns the EPT pointer of a root: write-back memory (bits 2:0), the number of levels less 1 (bits 5:3),
/// no accessed and dirty flags (bit 6). SDM, "Extended-page-table pointer".
#[must_use]
pub const fn ept_pointer(root: HostPhys, depth: Depth) -> u64 {
    const WRITE_BACK: u64 = 6;
    let levels = match depth {
        Depth::Four => 4,
        Depth::Five => 5,
    };
    root.as_u64() | (levels - 1) << 3 | WRITE_BACK
}

/// Fills the state that an exit loads. Its RSP leaves two words at the end of the stack: see
/// [`super::run`].
fn fill_host(area: &Area, hardware: &mut impl Hardware) {
    let area_virt = core::ptr::from_ref(area).expose_provenance() as u64;
    let tss = area_virt + core::mem::offset_of!(crate::cpu::Cpu, tss) as u64;
    hardware.vmwrite(vmcs::HOST_CR0, HOST_CR0);
    hardware.vmwrite(vmcs::HOST_CR3, area.cpu.gate.host_cr3);
    hardware.vmwrite(vmcs::HOST_CR4, area.cpu.gate.host_cr4);
    hardware.vmwrite(vmcs::HOST_CS_SELECTOR, u64::from(HOST_CS));
    for field in [vmcs::HOST_SS_SELECTOR, vmcs::HOST_DS_SELECTOR, vmcs::HOST_ES_SELECTOR] {
        hardware.vmwrite(field, u64::from(HOST_DS));
    }
    for field in [vmcs::HOST_FS_SELECTOR, vmcs::HOST_GS_SELECTOR, vmcs::HOST_FS_BASE, vmcs::HOST_GS_BASE] {
        hardware.vmwrite(field, 0);
    }
    // The hypervisor has no use for these: as they are, there is less to put back.
    let [_, _, sysenter @ ..] = area.own.captured;
    hardware.vmwrite(vmcs::HOST_SYSENTER_CS, sysenter[0]);
    hardware.vmwrite(vmcs::HOST_SYSENTER_ESP, sysenter[1]);
    hardware.vmwrite(vmcs::HOST_SYSENTER_EIP, sysenter[2]);
    hardware.vmwrite(vmcs::HOST_TR_SELECTOR, u64::from(HOST_TR));
    hardware.vmwrite(vmcs::HOST_TR_BASE, tss);
    hardware.vmwrite(vmcs::HOST_GDTR_BASE, area.cpu.host_gdtr.base_virt);
    hardware.vmwrite(vmcs::HOST_IDTR_BASE, area.cpu.host_idtr.base_virt);
    hardware.vmwrite(vmcs::HOST_EFER, area.own.host_efer);
    hardware.vmwrite(vmcs::HOST_PAT, area.own.host_pat);
    hardware.vmwrite(vmcs::HOST_RSP, area_virt + super::run::HOST_RSP_OFFSET as u64);
    hardware.vmwrite(vmcs::HOST_RIP, super::run::exit_virt());
    if area.own.controls.exit & controls::exit::LOAD_CET != 0 {
        for field in [vmcs::HOST_S_CET, vmcs::HOST_SSP, vmcs::HOST_INTERRUPT_SSP_TABLE] {
            hardware.vmwrite(field, 0);
        }
    }
}

fn fill_segments(area: &Area, hardware: &mut impl Hardware, live: &Live) {
    let inward = &area.cpu.gate.inward;
    put_segment(hardware, 0, &inward.es, inward.es.base);
    put_segment(hardware, 1, &inward.cs, inward.cs.base);
    put_segment(hardware, 2, &inward.ss, inward.ss.base);
    put_segment(hardware, 3, &inward.ds, inward.ds.base);
    put_segment(hardware, 4, &inward.fs, live.fs_base);
    put_segment(hardware, 5, &inward.gs, live.gs_base);
    put_segment(hardware, 6, &inward.ldtr, inward.ldtr_base_virt);
    put_segment(hardware, 7, &inward.tr, inward.tr_base_virt);
    hardware.vmwrite(vmcs::GUEST_GDTR_BASE, inward.gdtr.base_virt);
    hardware.vmwrite(vmcs::GUEST_GDTR_LIMIT, u64::from(inward.gdtr.limit));
    hardware.vmwrite(vmcs::GUEST_IDTR_BASE, inward.idtr.base_virt);
    hardware.vmwrite(vmcs::GUEST_IDTR_LIMIT, u64::from(inward.idtr.limit));
}

/// Fills the `number`th segment, ES being 0. Inlined, for a field's number is then a constant.
#[inline(always)]
pub(super) fn put_segment(hardware: &mut impl Hardware, number: u32, segment: &gate::Segment, base: u64) {
    hardware.vmwrite(vmcs::GUEST_ES_SELECTOR + 2 * number, u64::from(segment.selector));
    hardware.vmwrite(vmcs::GUEST_ES_LIMIT + 2 * number, u64::from(segment.limit));
    hardware.vmwrite(vmcs::GUEST_ES_RIGHTS + 2 * number, rights(segment));
    hardware.vmwrite(vmcs::GUEST_ES_BASE + 2 * number, base);
}

/// Returns a segment's access rights. LAR's layout is the VMCS's, and a null selector is unusable (SDM,
/// "Guest register state").
const fn rights(segment: &gate::Segment) -> u64 {
    if segment.attributes == 0 { UNUSABLE } else { segment.attributes as u64 }
}

fn fill_registers(area: &Area, hardware: &mut impl Hardware, live: &Live) {
    let inward = &area.cpu.gate.inward;
    // The driver has set CR4.VMXE before, in the kernel's own view too, so that KVM sees the hardware taken
    // (HARDWARE I-4): mask and shadow only guard it. CR0.NE is what VMX operation fixes.
    hardware.vmwrite(vmcs::CR0_MASK, CR0_NE);
    hardware.vmwrite(vmcs::CR0_SHADOW, area.cpu.guest_cr0);
    hardware.vmwrite(vmcs::GUEST_CR0, area.cpu.guest_cr0 | CR0_NE);
    hardware.vmwrite(vmcs::CR4_MASK, CR4_FIXED);
    hardware.vmwrite(vmcs::CR4_SHADOW, inward.cr4);
    hardware.vmwrite(vmcs::GUEST_CR4, inward.cr4 | CR4_FIXED);
    hardware.vmwrite(vmcs::GUEST_CR3, inward.cr3);
    let dr7 = hardware.dr7();
    hardware.vmwrite(vmcs::GUEST_DR7, dr7);
    hardware.vmwrite(vmcs::GUEST_RSP, inward.rsp);
    hardware.vmwrite(vmcs::GUEST_RIP, inward.rip);
    hardware.vmwrite(vmcs::GUEST_RFLAGS, inward.rflags);
    hardware.vmwrite(vmcs::GUEST_SYSENTER_CS, live.sysenter[0]);
    hardware.vmwrite(vmcs::GUEST_SYSENTER_ESP, live.sysenter[1]);
    hardware.vmwrite(vmcs::GUEST_SYSENTER_EIP, live.sysenter[2]);
    hardware.vmwrite(vmcs::GUEST_DEBUGCTL, live.debugctl);
    hardware.vmwrite(vmcs::GUEST_PAT, live.pat);
    hardware.vmwrite(vmcs::GUEST_EFER, live.efer);
    hardware.vmwrite(vmcs::GUEST_ACTIVITY, activity::ACTIVE);
    hardware.vmwrite(vmcs::GUEST_INTERRUPTIBILITY, 0);
    hardware.vmwrite(vmcs::GUEST_PENDING_DEBUG, 0);
}

/// Fills the CET fields. The kernel has no shadow stack (preflight), so SSP has no meaning.
fn fill_cet(hardware: &mut impl Hardware, live: &Live) {
    hardware.vmwrite(vmcs::GUEST_S_CET, live.cet[0]);
    hardware.vmwrite(vmcs::GUEST_SSP, 0);
    hardware.vmwrite(vmcs::GUEST_INTERRUPT_SSP_TABLE, live.cet[1]);
}

/// Prepares the way out of a guest: fills the gate's outward block from the VMCS, puts MSRs back into the
/// processor, and leaves VMX operation. CR0, DR6 and DR7 may be corrupt: values that would fault in the
/// gate are dropped. CR4 is the value that the processor reported at this exit, and may hold bits that only
/// a later kernel knows.
#[inline]
pub fn put_back(area: &mut Area, hardware: &mut impl Hardware) {
    let outward = &mut area.cpu.gate.outward;
    // NE and VMXE stay as the system reads them: set, unless it is another system.
    outward.cr0 = hardware.vmread(vmcs::GUEST_CR0) & 0xFFFF_FFFF;
    outward.cr2 = hardware.cr2();
    outward.cr3 = hardware.vmread(vmcs::GUEST_CR3);
    outward.cr4 = hardware.vmread(vmcs::GUEST_CR4);
    if area.own.foreign != 0 {
        outward.cr0 &= !CR0_NE | hardware.vmread(vmcs::CR0_SHADOW);
        outward.cr4 &= !CR4_FIXED | hardware.vmread(vmcs::CR4_SHADOW);
    }
    outward.dr6 = hardware.dr6() & 0xFFFF_FFFF;
    outward.dr7 = hardware.vmread(vmcs::GUEST_DR7) & 0xFFFF_FFFF;
    outward.gdtr.base_virt = hardware.vmread(vmcs::GUEST_GDTR_BASE);
    outward.gdtr.limit = hardware.vmread(vmcs::GUEST_GDTR_LIMIT) as u16;
    outward.idtr.base_virt = hardware.vmread(vmcs::GUEST_IDTR_BASE);
    outward.idtr.limit = hardware.vmread(vmcs::GUEST_IDTR_LIMIT) as u16;
    outward.selectors = [
        hardware.vmread(vmcs::GUEST_ES_SELECTOR),
        hardware.vmread(vmcs::GUEST_CS_SELECTOR),
        hardware.vmread(vmcs::GUEST_SS_SELECTOR),
        hardware.vmread(vmcs::GUEST_DS_SELECTOR),
    ];
    outward.thread_selectors =
        [hardware.vmread(vmcs::GUEST_FS_SELECTOR), hardware.vmread(vmcs::GUEST_GS_SELECTOR)];
    outward.thread_bases = [hardware.vmread(vmcs::GUEST_FS_BASE), hardware.vmread(vmcs::GUEST_GS_BASE)];
    outward.rip = hardware.vmread(vmcs::GUEST_RIP);
    outward.rflags = hardware.vmread(vmcs::GUEST_RFLAGS);
    outward.registers[4] = hardware.vmread(vmcs::GUEST_RSP);
    note_system_segments(area, hardware);
    return_msrs(area, hardware);
    leave_vmx(area, hardware);
}

/// Leaves VMX operation. A machine check that strikes from here on finds no guest to be given to.
#[inline]
pub fn leave_vmx(area: &mut Area, hardware: &mut impl Hardware) {
    area.own.vmx_on = 0;
    compiler_fence(Ordering::SeqCst);
    hardware.vmxoff(area.cpu.control_phys);
}

/// Notes TR and LDTR for [`super::run::restore_extended_state`]. TR is mostly what it was at the attach,
/// where its descriptor was made.
#[inline]
fn note_system_segments(area: &mut Area, hardware: &mut impl Hardware) {
    let tr = &area.own.tr;
    let same = hardware.vmread(vmcs::GUEST_TR_SELECTOR) as u16 == tr.selector
        && hardware.vmread(vmcs::GUEST_TR_LIMIT) as u32 == tr.limit
        && hardware.vmread(vmcs::GUEST_TR_BASE) == tr.base_virt;
    let ldtr = hardware.vmread(vmcs::GUEST_LDTR_SELECTOR) as u16;
    area.own.ldtr.selector = ldtr;
    if !same || ldtr != 0 {
        note_changed_segments(area, hardware);
    }
}

#[cold]
#[inline(never)]
fn note_changed_segments(area: &mut Area, hardware: &mut impl Hardware) {
    note_segment(&mut area.own.ldtr, hardware, 6);
    note_segment(&mut area.own.tr, hardware, 7);
    area.host.put(&area.own.tr);
    area.host.put(&area.own.ldtr);
}

/// Notes a segment field by field: vector registers are still the system's.
fn note_segment(segment: &mut SystemSegment, hardware: &mut impl Hardware, number: u32) {
    segment.selector = hardware.vmread(vmcs::GUEST_ES_SELECTOR + 2 * number) as u16;
    segment.attributes = hardware.vmread(vmcs::GUEST_ES_RIGHTS + 2 * number) as u32;
    segment.limit = hardware.vmread(vmcs::GUEST_ES_LIMIT + 2 * number) as u32;
    segment.base_virt = hardware.vmread(vmcs::GUEST_ES_BASE + 2 * number);
}

/// Puts back MSRs that an exit has loaded, with the hypervisor's values or those of the attach. They are
/// compared here, and written where they differ.
#[inline]
fn return_msrs(area: &mut Area, hardware: &mut impl Hardware) {
    area.cpu.gate.outward.efer = 0;
    area.cpu.gate.outward.debugctl = 0;
    let differing = loaded_msrs(area)
        .into_iter()
        .fold(0, |bits, (_, field, loaded)| bits | hardware.vmread(field) ^ loaded);
    if differing != 0 {
        write_changed_msrs(area, hardware);
    }
    if area.own.controls.entry & entry::LOAD_CET != 0 {
        return_cet(hardware);
    }
}

/// Returns each MSR that exits load, with its guest field and the value in the processor now.
#[inline]
fn loaded_msrs(area: &Area) -> [(u32, u32, u64); 6] {
    let own = &area.own;
    [
        (msr::SYSENTER_CS, vmcs::GUEST_SYSENTER_CS, own.captured[2]),
        (msr::SYSENTER_ESP, vmcs::GUEST_SYSENTER_ESP, own.captured[3]),
        (msr::SYSENTER_EIP, vmcs::GUEST_SYSENTER_EIP, own.captured[4]),
        (msr::DEBUGCTL, vmcs::GUEST_DEBUGCTL, 0),
        (msr::PAT, vmcs::GUEST_PAT, own.host_pat),
        (msr::EFER, vmcs::GUEST_EFER, own.host_efer),
    ]
}

/// Writes the MSRs that the guest has changed while it was attached. A corrupt value faults, and is
/// dropped.
#[cold]
#[inline(never)]
fn write_changed_msrs(area: &mut Area, hardware: &mut impl Hardware) {
    for (index, field, loaded) in loaded_msrs(area) {
        let value = hardware.vmread(field);
        if index == msr::EFER && value & efer::NXE == 0 {
            area.cpu.gate.outward.efer = without_no_execute(value);
        } else if index == msr::DEBUGCTL && value & debugctl::BTS != 0 {
            // Branches that are stored here would go through the hypervisor's page tables.
            area.cpu.gate.outward.debugctl = value & debugctl::KNOWN;
        } else if value != loaded {
            let _ = hardware.write_msr(index, value);
        }
    }
}

/// Returns an EFER for the gate to load, if it lacks NXE. The hypervisor's own tables, which are still in
/// use, have NX bits, so the gate loads it when they are not. There is no recovery from a fault there: a
/// corrupt value is dropped.
const fn without_no_execute(value: u64) -> u64 {
    const LONG_MODE: u64 = efer::LME | efer::LMA;
    if value & LONG_MODE == LONG_MODE && value & !efer::KNOWN == 0 { value } else { 0 }
}

/// Puts back CET state. For user mode that leaves, the shadow-stack pointer is in the VMCS, and the gate's
/// IRET loads it from PL3_SSP (SDM volume 1, "Shadow stack usage on privilege level changes"). In the
/// kernel PL3_SSP holds it already.
///
/// A kernel may leave between an indirect branch and its target. The check of the target is dropped then:
/// the next instruction is the gate's.
fn return_cet(hardware: &mut impl Hardware) {
    const SHSTK_EN: u64 = 1;
    const WAIT_FOR_ENDBRANCH: u64 = 1 << 11;
    let s_cet = hardware.vmread(vmcs::GUEST_S_CET) & !WAIT_FOR_ENDBRANCH;
    let _ = hardware.write_msr(msr::S_CET, s_cet);
    let isst_addr = hardware.vmread(vmcs::GUEST_INTERRUPT_SSP_TABLE);
    let _ = hardware.write_msr(msr::ISST_ADDR, isst_addr);
    let shadowed = privilege(hardware) == 3
        && hardware.vmread(vmcs::GUEST_CR4) & cr4::CET != 0
        && hardware.read_msr(msr::U_CET).is_some_and(|user| user & SHSTK_EN != 0);
    if shadowed {
        let pointer = hardware.vmread(vmcs::GUEST_SSP);
        let _ = hardware.write_msr(msr::PL3_SSP, pointer);
    }
}

/// Returns the guest's CPL: the DPL of SS (SDM, "Guest register state").
#[inline]
pub fn privilege(hardware: &mut impl Hardware) -> u64 {
    hardware.vmread(vmcs::GUEST_SS_RIGHTS) >> 5 & 3
}

/// Prepares the way out of a native operation that did not enter the guest. All registers are as they came
/// in, with `result` in RAX. An entry that the processor refused has loaded the hypervisor's state all the
/// same (SDM, "VM-entry failures during or after loading guest state").
pub fn put_back_native(area: &mut Area, hardware: &mut impl Hardware, result: Code) {
    let bases = if area.own.vmx_on == 0 {
        [msr::FS_BASE, msr::GS_BASE].map(|index| hardware.read_msr(index).unwrap_or(0))
    } else {
        undo_fill(area, hardware)
    };
    let inward = area.cpu.gate.inward;
    let outward = &mut area.cpu.gate.outward;
    outward.cr0 = area.cpu.guest_cr0;
    outward.cr2 = hardware.cr2();
    outward.cr3 = inward.cr3;
    outward.cr4 = inward.cr4;
    debug_assert!(outward.cr4 & CR4_PGE != 0);
    outward.dr6 = hardware.dr6();
    outward.dr7 = hardware.dr7();
    outward.gdtr = inward.gdtr;
    outward.idtr = inward.idtr;
    outward.selectors = [inward.es, inward.cs, inward.ss, inward.ds].map(|from| u64::from(from.selector));
    outward.thread_selectors = [inward.fs, inward.gs].map(|from| u64::from(from.selector));
    outward.thread_bases = bases;
    outward.efer = 0;
    outward.rip = inward.rip;
    outward.rflags = inward.rflags;
    outward.registers[0] = u64::from(result as u32);
    outward.registers[4] = inward.rsp;
    put_inward_segments(area);
}

/// Leaves VMX operation with MSRs as [`attach`] found them. Returns the bases of FS and GS.
fn undo_fill(area: &mut Area, hardware: &mut impl Hardware) -> [u64; 2] {
    let [fs_base, gs_base, ..] = area.own.captured;
    let _ = hardware.write_msr(msr::DEBUGCTL, area.own.captured_debugctl);
    if area.own.controls.exit & controls::exit::LOAD_CET != 0 {
        let [s_cet, isst_addr] = area.own.captured_cet;
        let _ = hardware.write_msr(msr::S_CET, s_cet);
        let _ = hardware.write_msr(msr::ISST_ADDR, isst_addr);
    }
    leave_vmx(area, hardware);
    [fs_base, gs_base]
}
