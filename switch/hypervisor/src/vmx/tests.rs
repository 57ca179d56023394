//! Attach and exits on a model processor: the VMCS from a live state, every answer, and the state after a
//! departure.

use std::collections::BTreeMap;

use mercury_abi::code::Code;
use mercury_abi::gate::{HYPERCALL_MAGIC, Hypercall, Segment};
use mercury_abi::refusal::Refusal;
use mercury_abi::shared::{EXIT_CODE_VMX, ExitReason, LogKind, SharedCpu};
use mercury_preflight::bits::{cr0, cr4};
use mercury_preflight::example::good_xeon;
use mercury_preflight::vmx::{entry, exit, primary, secondary};
use proptest::prelude::*;

use super::capture::feature;

use super::vmcs::{self, activity, blocking, event, reason};
use super::{Area, LeaveGdt, SystemSegment, Vmx, capture, exits, refusal};
use crate::address::HostPhys;
use crate::cpu::Phase;
use crate::host::entry::Next;
use crate::machine_check;
use crate::model::{LINUX_EFER, LINUX_PAT, Model};
use crate::paging::table::Depth;
use crate::quick::Quick;
use crate::x86::{Hardware, RFLAGS_RF, RFLAGS_TF, msr};

const RAX: usize = 0;
const RCX: usize = 1;
const RDX: usize = 2;
const RBX: usize = 3;
pub const CR4: u64 = 0x37_26F0;
pub const RIP: u64 = 0xFFFF_FFFF_C000_1000;
const RSP: u64 = 0xFFFF_C900_0000_3F00;
const SYSENTER_EIP: u64 = 0xFFFF_FFFF_81E0_1000;
pub const TSS: u64 = 0xFFFF_FE00_0000_3000;

/// A CPU of a running Linux.
pub struct Cpu {
    pub area: Box<Area>,
    pub hardware: Model,
    _shared: Box<SharedCpu>,
}

impl Cpu {
    /// Returns a native CPU, in the hypervisor's operation to attach.
    pub fn native() -> Self {
        // SAFETY: both are made of integers only; all zeros is valid.
        let (mut area, mut shared) = unsafe {
            (Box::<Area>::new_zeroed().assume_init(), Box::<SharedCpu>::new_zeroed().assume_init())
        };
        area.cpu.gate.shared_virt = (&raw mut *shared).expose_provenance() as u64;
        area.cpu.gate.area_phys = 0x123_4000;
        area.cpu.control_phys = 0x123_5000;
        area.cpu.gate.host_cr3 = 0x77_7000;
        area.cpu.gate.host_cr4 = 0x26E0;
        area.cpu.guest_cr0 = 0x8005_0033;
        let inward = &mut area.cpu.gate.inward;
        (inward.rip, inward.rsp, inward.rflags) = (RIP, RSP, 2);
        (inward.cr3, inward.cr4) = (0x1234_5000, CR4);
        let flat =
            |selector, attributes| Segment { selector, attributes, limit: u32::MAX, ..Segment::default() };
        (inward.cs, inward.ss) = (flat(0x10, 0xA09B), flat(0x18, 0xC093));
        inward.tr = Segment { selector: 0x40, attributes: 0x8B, limit: 0x4087, ..Segment::default() };
        inward.tr_base_virt = TSS;
        (inward.gdtr.base_virt, inward.gdtr.limit) = (0xFFFF_FE00_0000_1000, 0x7F);
        (inward.idtr.base_virt, inward.idtr.limit) = (0xFFFF_FE00_0000_0000, 0xFFF);
        let msrs = BTreeMap::from([
            (msr::EFER, LINUX_EFER),
            (msr::PAT, LINUX_PAT),
            (msr::FS_BASE, 0x7FFF_F7D8_0740),
            (msr::GS_BASE, 0xFFFF_8880_7DC0_0000),
            (msr::SYSENTER_CS, 0x10),
            (msr::SYSENTER_ESP, 0xFFFF_FE00_0000_3200),
            (msr::SYSENTER_EIP, SYSENTER_EIP),
            (msr::DEBUGCTL, 0),
        ]);
        let facts = good_xeon(0);
        area.cpu.features = capture::features(&facts);
        capture::learn(&mut area, &facts);
        Self { area, hardware: Model { msrs, ..Model::default() }, _shared: shared }
    }

    /// Returns an attached CPU, between two exits.
    pub fn attached() -> Self {
        let mut cpu = Self::native();
        assert_eq!(capture::attach(&mut cpu.area, &mut cpu.hardware), Ok(()));
        cpu.area.cpu.entered = 1;
        cpu.area.own.launched = 1;
        // State that an exit loads.
        for index in [msr::FS_BASE, msr::GS_BASE] {
            cpu.hardware.msrs.insert(index, 0);
        }
        cpu.set(vmcs::EXIT_INSTRUCTION_LENGTH, 3);
        cpu
    }

    /// Sets a field as the processor does.
    pub fn set(&mut self, field: u32, value: u64) {
        self.hardware.fields.insert(field, value);
    }

    pub fn get(&self, field: u32) -> u64 {
        self.hardware
            .fields
            .get(&field)
            .copied()
            .unwrap_or_else(|| panic!("field {field:#x} was never written"))
    }

    pub fn register(&mut self, number: usize) -> &mut u64 {
        &mut self.area.cpu.gate.outward.registers[number]
    }

    /// Makes an exit for this reason, as the world switch hands it over.
    pub fn exit(&mut self, reason: u32) -> Next {
        self.set(vmcs::EXIT_REASON, u64::from(reason));
        if reason & reason::ENTRY_FAILED == 0 {
            self.set(vmcs::ENTRY_INTERRUPTION, self.get(vmcs::ENTRY_INTERRUPTION) & !event::VALID);
        }
        self.area.cpu.phase = Phase::Exit;
        exits::begin(&mut self.area, &mut self.hardware);
        let next = exits::handle(&mut self.area, &mut self.hardware);
        machine_check::finish(&mut self.area, &mut self.hardware, next)
    }

    /// Has a machine check strike in the hypervisor.
    fn machine_check(&mut self) {
        machine_check::note(&mut self.area, &mut self.hardware, true);
    }

    /// Has a machine check strike in compiled code.
    fn machine_check_in_an_exit(&mut self) {
        self.area.cpu.phase = Phase::Exit;
        self.machine_check();
    }

    fn awaits_window(&self) -> bool {
        self.get(vmcs::PRIMARY_CONTROLS) & u64::from(primary::INTERRUPT_WINDOW_EXITING) != 0
    }

    pub fn hypercall(&mut self, call: u64) -> Next {
        *self.register(RAX) = call;
        *self.register(RCX) = HYPERCALL_MAGIC;
        self.exit(reason::VMCALL)
    }

    pub fn injected(&self) -> u64 {
        self.get(vmcs::ENTRY_INTERRUPTION)
    }

    fn count(&mut self, reason: ExitReason) -> u64 {
        self.area.shared().exits[reason as usize]
    }

    fn user_mode(&mut self) {
        self.set(vmcs::GUEST_SS_RIGHTS, 0xC0F3);
    }
}

#[test]
fn the_vmcs_is_the_live_state() {
    let cpu = Cpu::attached();
    for (field, expected) in [
        (vmcs::GUEST_RIP, RIP),
        (vmcs::GUEST_RSP, RSP),
        (vmcs::GUEST_RFLAGS, 2),
        (vmcs::GUEST_CR0, 0x8005_0033),
        (vmcs::CR0_SHADOW, 0x8005_0033),
        (vmcs::GUEST_CR3, 0x1234_5000),
        (vmcs::GUEST_CR4, CR4),
        (vmcs::CR4_SHADOW, CR4),
        (vmcs::CR4_MASK, 1 << 13),
        (vmcs::CR0_MASK, 1 << 5),
        (vmcs::GUEST_CS_SELECTOR, 0x10),
        (vmcs::GUEST_CS_RIGHTS, 0xA09B),
        (vmcs::GUEST_SS_RIGHTS, 0xC093),
        (vmcs::GUEST_ES_RIGHTS, vmcs::UNUSABLE),
        (vmcs::GUEST_LDTR_RIGHTS, vmcs::UNUSABLE),
        (vmcs::GUEST_TR_SELECTOR, 0x40),
        (vmcs::GUEST_TR_RIGHTS, 0x8B),
        (vmcs::GUEST_TR_LIMIT, 0x4087),
        (vmcs::GUEST_TR_BASE, TSS),
        (vmcs::GUEST_FS_BASE, 0x7FFF_F7D8_0740),
        (vmcs::GUEST_GS_BASE, 0xFFFF_8880_7DC0_0000),
        (vmcs::GUEST_GDTR_LIMIT, 0x7F),
        (vmcs::GUEST_SYSENTER_EIP, SYSENTER_EIP),
        (vmcs::GUEST_EFER, LINUX_EFER),
        (vmcs::GUEST_PAT, LINUX_PAT),
        (vmcs::HOST_CR3, 0x77_7000),
        (vmcs::HOST_CR4, 0x26E0),
        (vmcs::HOST_EFER, LINUX_EFER),
        (vmcs::HOST_TR_SELECTOR, 0x20),
        (vmcs::VMCS_LINK_POINTER, u64::MAX),
        (vmcs::VPID, 1),
        (vmcs::EXCEPTION_BITMAP, 0),
    ] {
        assert_eq!(cpu.get(field), expected, "{field:#x}");
    }
    assert_eq!(cpu.area.control.revision, 4);
    assert_eq!(cpu.hardware.flushes, 1, "what the last attachment left is forgotten");
    let written = cpu.get(vmcs::PRIMARY_CONTROLS) as u32;
    assert_eq!(written & primary::MONITOR_TRAP_FLAG, 0);
    assert_eq!(
        refusal::first(good_xeon(0).vmx_cr4_fixed1, &mut Cpu::attached().hardware).0,
        Refusal::UnknownState
    );
}

#[test]
fn every_field_that_a_control_makes_count_is_written() {
    let mut cpu = Cpu::native();
    let mut facts = good_xeon(0);
    facts.cpuid_7_0.edx |= 1 << 18;
    facts.cpuid_7_1.eax |= 1 << 27;
    facts.vmx_tertiary_controls = 1 << 6;
    facts.vmx_primary_controls |= 1 << (32 + 17);
    facts.cr4 |= 1 << 23;
    facts.vmx_exit_controls |= 1 << (32 + 28);
    facts.vmx_entry_controls |= 1 << (32 + 20);
    capture::learn(&mut cpu.area, &facts);
    assert_eq!(capture::attach(&mut cpu.area, &mut cpu.hardware), Ok(()));
    // Fields that software only reads, and fields that only a reset writes.
    let read_only = |field: u32| field >> 10 & 3 == 1;
    let elsewhere = [vmcs::ENTRY_ERROR_CODE];
    for (field, name) in vmcs::ALL {
        if !read_only(*field) && !elsewhere.contains(field) {
            assert!(cpu.hardware.fields.contains_key(field), "{name}");
        }
    }
}

#[test]
fn attach_needs_a_preflight_and_reports_what_fails() {
    let mut cpu = Cpu::native();
    cpu.area.own.controls = Default::default();
    assert_eq!(capture::attach(&mut cpu.area, &mut cpu.hardware), Err(Code::StateChanged));
    let mut cpu = Cpu::native();
    cpu.hardware.vmxon_fails = true;
    assert_eq!(capture::attach(&mut cpu.area, &mut cpu.hardware), Err(Code::InvalidGuestState));
    assert_eq!(cpu.area.cpu.gate.detail[0], Refusal::VmxonFailed as u64);
    let mut cpu = Cpu::native();
    cpu.hardware.vmcs_error = Some(11);
    assert_eq!(capture::attach(&mut cpu.area, &mut cpu.hardware), Err(Code::InvalidGuestState));
    assert_eq!(cpu.area.cpu.gate.detail[0], Refusal::VmptrldRevision as u64);
    capture::put_back_native(&mut cpu.area, &mut cpu.hardware, Code::InvalidGuestState);
    assert!(!cpu.hardware.vmx_on, "rolled back");
    let bases = [0x7FFF_F7D8_0740, 0xFFFF_8880_7DC0_0000];
    assert_eq!(cpu.area.cpu.gate.outward.thread_bases, bases, "the VMCS never had them");
    for selector in [0x18, 0x44, 0xFFF8] {
        let mut cpu = Cpu::native();
        cpu.area.cpu.gate.inward.tr.selector = selector;
        assert_eq!(capture::attach(&mut cpu.area, &mut cpu.hardware), Err(Code::SegmentUnreadable));
    }
}

#[test]
fn ept_pointers() {
    assert_eq!(capture::ept_pointer(HostPhys::new(0x5000), Depth::Four), 0x501E);
    assert_eq!(capture::ept_pointer(HostPhys::new(0x5000), Depth::Five), 0x5026);
}

#[test]
fn ping_answers_and_moves_on() {
    let mut cpu = Cpu::attached();
    assert_eq!(cpu.hypercall(Hypercall::Ping as u64), Next::Run);
    assert_eq!(*cpu.register(RAX), 0);
    assert_eq!(*cpu.register(RDX), u64::from(mercury_abi::MERCURY_ABI_VERSION));
    assert_eq!(cpu.get(vmcs::GUEST_RIP), RIP + 3);
    assert_eq!(cpu.count(ExitReason::Hypercall), 1);
}

#[test]
fn hypercalls_of_others_are_undefined() {
    for user in [false, true] {
        let mut cpu = Cpu::attached();
        if user {
            cpu.user_mode();
            assert_eq!(cpu.hypercall(Hypercall::Detach as u64), Next::Run);
        } else {
            assert_eq!(cpu.exit(reason::VMCALL), Next::Run);
        }
        assert_eq!(cpu.injected(), event::INVALID_OPCODE);
        assert_eq!(cpu.get(vmcs::GUEST_RIP), RIP);
        assert_eq!(cpu.count(ExitReason::ForeignHypercall), 1);
    }
}

#[test]
fn detach_gives_the_processor_back() {
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::GUEST_LDTR_SELECTOR, 0x50);
    cpu.set(vmcs::GUEST_LDTR_RIGHTS, 0x82);
    cpu.set(vmcs::GUEST_LDTR_LIMIT, 0xFFFF);
    cpu.set(vmcs::GUEST_LDTR_BASE, 0xFFFF_C900_0012_0000);
    cpu.set(vmcs::GUEST_DEBUGCTL, 0x4000);
    cpu.set(vmcs::GUEST_FS_SELECTOR, 0x33);
    assert_eq!(cpu.hypercall(Hypercall::Detach as u64), Next::Leave);
    assert!(!cpu.hardware.vmx_on);
    let outward = &cpu.area.cpu.gate.outward;
    assert_eq!((outward.rip, outward.registers[0], outward.registers[4]), (RIP + 3, 0, RSP));
    assert_eq!((outward.cr0, outward.cr3, outward.cr4), (0x8005_0033, 0x1234_5000, CR4));
    assert_eq!((outward.gdtr.limit, outward.idtr.limit), (0x7F, 0xFFF), "an exit sets both to FFFFh");
    assert_eq!(outward.thread_selectors, [0x33, 0]);
    assert_eq!(outward.thread_bases, [0x7FFF_F7D8_0740, 0xFFFF_8880_7DC0_0000]);
    assert_eq!(cpu.hardware.msrs[&msr::SYSENTER_EIP], SYSENTER_EIP);
    assert_eq!(cpu.hardware.msrs[&msr::DEBUGCTL], 0x4000);
    let tr = SystemSegment { selector: 0x40, attributes: 0x8B, limit: 0x4087, base_virt: TSS };
    assert_eq!(cpu.area.own.tr, tr);
    assert_eq!(cpu.area.own.ldtr.selector, 0x50);
    assert_eq!(cpu.area.shared().left_because, 0);
}

/// A recording of branches that began while the CPU was attached goes on, but not through the hypervisor's
/// tables.
#[test]
fn branches_are_stored_again_after_the_gate() {
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::GUEST_DEBUGCTL, 0x2C1);
    assert_eq!(cpu.hypercall(Hypercall::Detach as u64), Next::Leave);
    assert_eq!(cpu.hardware.msrs[&msr::DEBUGCTL], 0);
    assert_eq!(cpu.area.cpu.gate.outward.debugctl, 0x2C1);
}

#[test]
fn pat_and_efer_that_the_guest_changed_are_its_own_afterwards() {
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::GUEST_PAT, 0x0007_0406_0007_0406);
    cpu.set(vmcs::GUEST_EFER, LINUX_EFER & !1);
    assert_eq!(cpu.hypercall(Hypercall::Detach as u64), Next::Leave);
    assert_eq!(cpu.hardware.msrs[&msr::PAT], 0x0007_0406_0007_0406);
    assert_eq!(cpu.hardware.msrs[&msr::EFER], LINUX_EFER & !1);
}

#[test]
fn flush_is_done_before_it_is_acknowledged() {
    let mut cpu = Cpu::attached();
    assert_eq!(cpu.hypercall(Hypercall::Flush as u64), Next::Run);
    assert_eq!((cpu.hardware.flushes, *cpu.register(RAX)), (2, 0));
}

#[test]
fn cpuid_shows_the_guests_control_registers() {
    let leaves = BTreeMap::from([
        (1, [1, 2, 1 << 27 | 1 << 5, 4]),
        (7, [0, 0, 1 << 4, 0]),
        (0x8000_0001, [0, 0, 0, 1 << 11]),
        (2, [5, 6, 7, 8]),
    ]);
    let ask = |cr4: u64, cs: u64, leaf: u64| {
        let mut cpu = Cpu::attached();
        cpu.hardware.leaves = leaves.clone();
        cpu.set(vmcs::GUEST_CR4, cr4);
        cpu.set(vmcs::GUEST_CS_RIGHTS, cs);
        *cpu.register(RAX) = leaf | 0xDEAD << 32;
        assert_eq!(cpu.exit(reason::CPUID), Next::Run);
        assert_eq!(cpu.count(ExitReason::Cpuid), 1);
        [RAX, RBX, RCX, RDX].map(|register| *cpu.register(register))
    };
    assert_eq!(ask(CR4, 0xA09B, 2), [5, 6, 7, 8]);
    assert_eq!(ask(CR4, 0xA09B, 1), [1, 2, 1 << 27 | 1 << 5, 4], "VMX shows, as it does natively");
    assert_eq!(ask(CR4 & !(1 << 18), 0xA09B, 1)[2], 1 << 5);
    assert_eq!(ask(CR4, 0xA09B, 7)[2], 0);
    assert_eq!(ask(CR4 | 1 << 22, 0xA09B, 7)[2], 1 << 4);
    assert_eq!(ask(CR4, 0xA09B, 0x8000_0001)[3], 1 << 11);
    assert_eq!(ask(CR4, 0xC0FB, 0x8000_0001)[3], 0, "no SYSCALL outside of 64-bit mode");
}

#[test]
fn a_single_step_over_cpuid_traps() {
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::GUEST_RFLAGS, 2 | RFLAGS_TF | RFLAGS_RF);
    cpu.set(vmcs::GUEST_INTERRUPTIBILITY, blocking::STI);
    cpu.set(vmcs::EXIT_INSTRUCTION_LENGTH, 2);
    assert_eq!(cpu.exit(reason::CPUID), Next::Run);
    assert_eq!(cpu.get(vmcs::GUEST_PENDING_DEBUG), 1 << 14);
    assert_eq!(cpu.get(vmcs::GUEST_INTERRUPTIBILITY), 0);
    assert_eq!(cpu.get(vmcs::GUEST_RFLAGS), 2 | RFLAGS_TF);
    assert_eq!(cpu.get(vmcs::GUEST_RIP), RIP + 2);
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::GUEST_RFLAGS, 2 | RFLAGS_TF);
    cpu.set(vmcs::GUEST_DEBUGCTL, 2);
    assert_eq!(cpu.exit(reason::CPUID), Next::Run);
    assert_eq!(cpu.get(vmcs::GUEST_PENDING_DEBUG), 0, "single steps are of branches");
}

/// A user's 32-bit code ends at 4 GiB and goes on at 0. The processor refuses an entry with more bits in RIP.
#[test]
fn rip_has_32_bits_outside_64_bit_code() {
    const LONG: u64 = 1 << 13;
    for (rights, expected) in [(0xC0FB, 0), (0xA0FB | LONG, 1 << 32)] {
        let mut cpu = Cpu::attached();
        cpu.user_mode();
        cpu.set(vmcs::GUEST_CS_RIGHTS, rights);
        cpu.set(vmcs::GUEST_RIP, 0xFFFF_FFFE);
        cpu.set(vmcs::EXIT_INSTRUCTION_LENGTH, 2);
        assert_eq!(cpu.exit(reason::CPUID), Next::Run);
        assert_eq!(cpu.get(vmcs::GUEST_RIP), expected);
    }
}

#[test]
fn a_fault_pushes_rf() {
    let mut cpu = Cpu::attached();
    cpu.user_mode();
    assert_eq!(cpu.exit(reason::VMWRITE), Next::Run);
    assert_eq!(cpu.get(vmcs::GUEST_RFLAGS), 2 | RFLAGS_RF);
}

#[test]
fn vmx_instructions_are_undefined_and_the_owners_are_not() {
    for code in (reason::VMCLEAR..=reason::VMWRITE).chain([reason::INVEPT, reason::INVVPID, reason::GETSEC]) {
        let mut cpu = Cpu::attached();
        assert_eq!(cpu.exit(code), Next::Run);
        assert_eq!(cpu.injected(), event::INVALID_OPCODE, "{code}");
        assert_eq!(cpu.count(ExitReason::VirtInstruction), 1);
    }
    for code in [reason::VMXON, reason::VMXOFF] {
        let mut cpu = Cpu::attached();
        cpu.user_mode();
        assert_eq!(cpu.exit(code), Next::Run);
        assert_eq!(cpu.injected(), event::INVALID_OPCODE, "{code}");
    }
    let mut cpu = Cpu::attached();
    assert_eq!(cpu.exit(reason::VMXON), Next::Run);
    assert_eq!(cpu.injected(), event::GENERAL_PROTECTION, "KVM has a fix-up for that");
}

#[test]
fn vmxoff_is_a_detach() {
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::GUEST_RFLAGS, 2 | 0x41);
    assert_eq!(cpu.exit(reason::VMXOFF), Next::Leave);
    assert!(!cpu.hardware.vmx_on);
    assert_eq!(cpu.area.cpu.gate.outward.rip, RIP + 3, "it is done");
    assert_eq!(cpu.area.cpu.gate.outward.rflags, 2, "and has succeeded");
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::VmxReleased as u32));
}

pub fn write_control(cpu: &mut Cpu, register: u64, value: u64) -> Next {
    *cpu.register(RBX) = value;
    cpu.set(vmcs::EXIT_QUALIFICATION, register | (RBX as u64) << 8);
    cpu.exit(reason::CONTROL_REGISTER)
}

#[test]
fn vmxe_is_the_guests_to_clear_and_to_set() {
    let mut cpu = Cpu::attached();
    assert_eq!(write_control(&mut cpu, 4, CR4 & !(1 << 13)), Next::Run);
    assert_eq!((cpu.get(vmcs::GUEST_CR4), cpu.get(vmcs::CR4_SHADOW)), (CR4, CR4 & !(1 << 13)));
    // The tables may be another kernel's: the CPU does not leave by itself, but detaches when the driver
    // asks.
    const VMFUNC: u32 = 59;
    assert_eq!(cpu.exit(VMFUNC), Next::Run);
    assert_eq!(cpu.hypercall(Hypercall::Detach as u64), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.cr4, CR4 & !(1 << 13));
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::CR4_SHADOW, CR4 & !(1 << 13));
    assert_eq!(write_control(&mut cpu, 4, CR4), Next::Run);
    assert_eq!(cpu.get(vmcs::CR4_SHADOW), CR4);
    assert_eq!(cpu.hardware.flushes, 2);
    for illegal in [CR4 | 1 << 40, CR4 & !(1 << 5), CR4 ^ 1 << 12] {
        let mut cpu = Cpu::attached();
        assert_eq!(write_control(&mut cpu, 4, illegal), Next::Run);
        assert_eq!(cpu.injected(), event::GENERAL_PROTECTION, "{illegal:#x}");
        assert_eq!(cpu.get(vmcs::GUEST_CR4), CR4);
    }
}

#[test]
fn cr0_without_ne_is_the_guests_to_have() {
    let mut cpu = Cpu::attached();
    assert_eq!(write_control(&mut cpu, 0, 0x8005_0013), Next::Run);
    assert_eq!((cpu.get(vmcs::GUEST_CR0), cpu.get(vmcs::CR0_SHADOW)), (0x8005_0033, 0x8005_0013));
    for illegal in [0x8000_0000, 1 << 29, 1 << 40] {
        let mut cpu = Cpu::attached();
        assert_eq!(write_control(&mut cpu, 0, illegal), Next::Run);
        assert_eq!(cpu.injected(), event::GENERAL_PROTECTION, "{illegal:#x}");
    }
}

fn access_msr(cpu: &mut Cpu, index: u32, write: Option<u64>) -> Next {
    *cpu.register(RCX) = u64::from(index);
    if let Some(value) = write {
        *cpu.register(RAX) = value & 0xFFFF_FFFF;
        *cpu.register(RDX) = value >> 32;
    }
    cpu.exit(if write.is_some() { reason::WRMSR } else { reason::RDMSR })
}

#[test]
fn msrs_outside_the_bitmap_are_executed_for_real() {
    let mut cpu = Cpu::attached();
    cpu.hardware.msrs.insert(0xC000_2000, 0x1234_5678_9ABC_DEF0);
    assert_eq!(access_msr(&mut cpu, 0xC000_2000, None), Next::Run);
    assert_eq!((*cpu.register(RAX), *cpu.register(RDX)), (0x9ABC_DEF0, 0x1234_5678));
    assert_eq!(access_msr(&mut cpu, 0xC000_2000, Some(7)), Next::Run);
    assert_eq!(cpu.hardware.msrs[&0xC000_2000], 7);
    assert_eq!(access_msr(&mut cpu, 0x4000_0000, None), Next::Run);
    assert_eq!(cpu.injected(), event::GENERAL_PROTECTION);
    assert_eq!(cpu.count(ExitReason::MsrPassThrough), 3);
}

#[test]
fn an_mtrr_that_changes_lets_go_and_one_that_does_not_is_nothing() {
    let mut cpu = Cpu::attached();
    cpu.hardware.msrs.insert(msr::MTRR_DEF_TYPE, 0xC06);
    assert_eq!(access_msr(&mut cpu, msr::MTRR_DEF_TYPE, Some(0xC06)), Next::Run);
    assert_eq!(cpu.get(vmcs::GUEST_RIP), RIP + 3);
    assert_eq!(access_msr(&mut cpu, msr::MTRR_DEF_TYPE, Some(0)), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.rip, RIP + 3, "executed natively");
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::MtrrChanged as u32));
    let mut cpu = Cpu::attached();
    cpu.hardware.msrs.insert(msr::PEBS_ENABLE, 0);
    assert_eq!(access_msr(&mut cpu, msr::PEBS_ENABLE, Some(0)), Next::Run);
    assert_eq!(access_msr(&mut cpu, msr::PEBS_ENABLE, Some(1)), Next::Leave);
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::DebugStore as u32));
    let mut cpu = Cpu::attached();
    assert_eq!(access_msr(&mut cpu, msr::MICROCODE_TRIGGER, Some(0xFFFF_8880_0000_0000)), Next::Leave);
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::MicrocodeUpdate as u32));
}

/// Executes MOV to CR0 as the processor does: it exits only if it changes a masked bit.
fn move_to_cr0(cpu: &mut Cpu, value: u64) -> Next {
    if (value ^ cpu.get(vmcs::CR0_SHADOW)) & cpu.get(vmcs::CR0_MASK) != 0 {
        return write_control(cpu, 0, value);
    }
    cpu.set(vmcs::GUEST_CR0, value | 1 << 5);
    Next::Run
}

const CR0: u64 = 0x8005_0033;
const WITHOUT_CACHES: u64 = CR0 | cr0::CD;

/// Returns a CPU whose MTRRs are those of the nested tables.
fn with_mtrrs() -> Cpu {
    crate::nested::tests::install::<Vmx>();
    let mut cpu = Cpu::attached();
    cpu.hardware.leaves.insert(0x8000_0008, [0x3028, 0, 0, 0]);
    cpu.hardware.msrs.extend(crate::nested::tests::all_mtrrs());
    cpu
}

/// Writes the MTRRs as Linux does on each CPU when all are back from a suspend (6.1: `generic_set_all`;
/// 6.12: `cache_cpu_init`; both from `arch_thaw_secondary_cpus_end`, and with the same accesses): without
/// caches, E and FE and the default type cleared, then registers that are not what the kernel has noted,
/// then PAT, which does not exit, and what was cleared. Stops where the CPU leaves.
fn write_mtrrs_as_linux(cpu: &mut Cpu, noted: &[(u32, u64)]) -> Next {
    let default = cpu.hardware.msrs[&msr::MTRR_DEF_TYPE];
    let different = noted.iter().filter(|(index, value)| cpu.hardware.msrs[index] != *value);
    let mut writes = vec![(msr::MTRR_DEF_TYPE, default & !0xCFF)];
    writes.extend(different.filter(|(index, _)| *index != msr::MTRR_DEF_TYPE));
    let default = noted.iter().find(|(index, _)| *index == msr::MTRR_DEF_TYPE).map_or(default, |new| new.1);
    writes.push((msr::MTRR_DEF_TYPE, default));
    assert_eq!(move_to_cr0(cpu, WITHOUT_CACHES), Next::Run);
    for (index, value) in writes {
        cpu.set(vmcs::GUEST_RIP, RIP);
        if access_msr(cpu, index, Some(value)) == Next::Leave {
            return Next::Leave;
        }
        assert_eq!(cpu.hardware.msrs[&index], value, "{index:#x}");
    }
    move_to_cr0(cpu, CR0)
}

#[test]
fn a_cpu_that_writes_its_mtrrs_after_a_suspend_stays() {
    let mut cpu = with_mtrrs();
    assert_eq!(write_mtrrs_as_linux(&mut cpu, &[]), Next::Run);
    assert_eq!((cpu.get(vmcs::GUEST_CR0), cpu.get(vmcs::CR0_MASK)), (CR0, 1 << 5), "nothing exits any more");
    assert_eq!(cpu.area.shared().left_because, 0);
    // The next time as well.
    assert_eq!(write_mtrrs_as_linux(&mut cpu, &[(msr::MTRR_PHYS_BASE0, 0x8000_0000)]), Next::Run);
}

#[test]
fn mtrrs_that_are_others_after_a_suspend_let_go() {
    for noted in [
        (msr::MTRR_DEF_TYPE, 0xC00),
        (msr::MTRR_DEF_TYPE, 0x806),
        (msr::MTRR_PHYS_BASE0 + 1, 0xFF_C000_0800),
        (msr::MTRR_FIXED[10], 0),
    ] {
        let mut cpu = with_mtrrs();
        assert_eq!(write_mtrrs_as_linux(&mut cpu, &[noted]), Next::Leave, "{noted:x?}");
        assert_eq!(cpu.area.shared().left_because, u64::from(Code::MtrrChanged as u32));
        let outward = &cpu.area.cpu.gate.outward;
        assert_eq!((outward.rip, outward.cr0), (RIP, WITHOUT_CACHES), "the rest is executed natively");
    }
}

/// Natively all of the system's memory would be uncacheable from here on.
#[test]
fn a_cpu_that_goes_on_without_mtrrs_leaves() {
    let mut cpu = with_mtrrs();
    assert_eq!(move_to_cr0(&mut cpu, WITHOUT_CACHES), Next::Run);
    assert_eq!(access_msr(&mut cpu, msr::MTRR_DEF_TYPE, Some(0)), Next::Run);
    assert_eq!(move_to_cr0(&mut cpu, WITHOUT_CACHES & !0x8), Next::Run, "other bits are native");
    assert_eq!(move_to_cr0(&mut cpu, CR0), Next::Leave);
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::MtrrChanged as u32));
    let mut cpu = with_mtrrs();
    assert_eq!(access_msr(&mut cpu, msr::MTRR_DEF_TYPE, Some(0)), Next::Leave, "with caches");
}

/// Another kernel's CPU cannot leave any more, and its CR0 is its own again.
#[test]
fn a_cpu_that_is_reset_without_mtrrs_enables_its_caches() {
    for reset in [true, false] {
        let mut cpu = with_mtrrs();
        assert_eq!(move_to_cr0(&mut cpu, WITHOUT_CACHES), Next::Run);
        assert_eq!(access_msr(&mut cpu, msr::MTRR_DEF_TYPE, Some(0)), Next::Run);
        if reset {
            assert_eq!(cpu.exit(reason::INIT), Next::Run);
        } else {
            assert_eq!(write_control(&mut cpu, 4, CR4 & !cr4::VMXE), Next::Run);
        }
        assert_eq!(cpu.get(vmcs::CR0_MASK), 1 << 5);
    }
}

/// A crash kernel that was started beneath KVM's modules, which took the way of leaving before: it disables
/// the MTRRs while it writes them.
#[test]
fn another_kernel_writes_what_would_make_its_predecessor_leave() {
    let mut cpu = Cpu::attached();
    cpu.area.own.foreign = 1;
    cpu.hardware.msrs.extend([(msr::MTRR_DEF_TYPE, 0xC06), (msr::PEBS_ENABLE, 0)]);
    assert_eq!(access_msr(&mut cpu, msr::MTRR_DEF_TYPE, Some(0)), Next::Run);
    assert_eq!(cpu.hardware.msrs[&msr::MTRR_DEF_TYPE], 0);
    assert_eq!(access_msr(&mut cpu, msr::MICROCODE_TRIGGER, Some(0xFFFF_8880_0000_0000)), Next::Run);
    assert!(!cpu.hardware.msrs.contains_key(&msr::MICROCODE_TRIGGER), "not loaded");
    assert_eq!(access_msr(&mut cpu, msr::PEBS_ENABLE, Some(1)), Next::Run);
    assert_eq!((cpu.hardware.msrs[&msr::PEBS_ENABLE], cpu.injected()), (0, event::GENERAL_PROTECTION));
}

#[test]
fn xsetbv_is_the_processors_to_judge() {
    let ask = |cr4: u64, user: bool, value: u64| {
        let mut cpu = Cpu::attached();
        cpu.set(vmcs::GUEST_CR4, cr4);
        if user {
            cpu.user_mode();
        }
        *cpu.register(RAX) = value;
        assert_eq!(cpu.exit(reason::XSETBV), Next::Run);
        (cpu.hardware.xcr0, cpu.injected())
    };
    assert_eq!(ask(CR4, false, 7), (Some(7), 0));
    assert_eq!(ask(CR4, false, 6), (None, event::GENERAL_PROTECTION));
    assert_eq!(ask(CR4, true, 7), (None, event::GENERAL_PROTECTION));
    assert_eq!(ask(CR4 & !(1 << 18), false, 7), (None, event::INVALID_OPCODE));
}

#[test]
fn invd_writes_back() {
    let mut cpu = Cpu::attached();
    assert_eq!(cpu.exit(reason::INVD), Next::Run);
    assert_eq!((cpu.hardware.written_back, cpu.get(vmcs::GUEST_RIP)), (1, RIP + 3));
    cpu.user_mode();
    assert_eq!(cpu.exit(reason::INVD), Next::Run);
    assert_eq!((cpu.hardware.written_back, cpu.injected()), (1, event::GENERAL_PROTECTION));
}

#[test]
fn an_unknown_exit_lets_go_and_leaves_a_record() {
    let mut cpu = Cpu::attached();
    assert_eq!(cpu.exit(60), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.rip, RIP);
    let crash = cpu.area.shared().crash;
    assert_eq!((crash.code, crash.exit_code), (Code::UnknownExit as u32, EXIT_CODE_VMX | 60));
    assert_eq!((crash.guest_rip, crash.guest_registers[4]), (RIP, RSP));
    assert!(crash.message.starts_with(b"unknown exit 0x10000003c\0"));
    let kinds: Vec<u32> = cpu.area.shared().log.iter().map(|record| record.kind).take(2).collect();
    assert_eq!(kinds, [LogKind::Crash as u32, LogKind::Left as u32]);
}

#[test]
fn an_ept_violation_that_nothing_explains_lets_go() {
    // Reads and fetches of what is mapped; and a write, which no tables explain.
    for qualification in [0x09, 0x0C, 0x39, 0x0A] {
        let mut cpu = Cpu::attached();
        cpu.set(vmcs::GUEST_PHYSICAL_ADDRESS, crate::nested::tests::BEYOND);
        cpu.set(vmcs::EXIT_QUALIFICATION, qualification);
        assert_eq!(cpu.exit(reason::EPT_VIOLATION), Next::Leave, "{qualification:#x}");
    }
}

#[test]
fn an_event_in_delivery_is_delivered_before_the_cpu_leaves() {
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::VECTORING, event::VALID | 0xEC);
    assert_eq!(cpu.exit(60), Next::Run, "the event has no native counterpart");
    assert_eq!(cpu.injected(), event::VALID | 0xEC);
    assert!(cpu.awaits_window());
    cpu.set(vmcs::VECTORING, 0);
    assert_eq!(cpu.exit(60), Next::Leave);
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::UnknownExit as u32));
}

/// Delivering the event may itself exit, on a stack or a table that nothing has touched before.
#[test]
fn an_event_is_not_lost_to_a_nested_fault_of_its_own_delivery() {
    crate::nested::tests::install::<Vmx>();
    let mut cpu = Cpu::attached();
    let timer = event::VALID | 0xEC;
    cpu.set(vmcs::VECTORING, timer);
    assert_eq!(cpu.exit(60), Next::Run);
    assert_eq!(cpu.injected(), timer);
    cpu.set(vmcs::EXIT_QUALIFICATION, 2);
    cpu.set(vmcs::GUEST_PHYSICAL_ADDRESS, crate::nested::tests::UNTOUCHED);
    assert_eq!(cpu.exit(reason::EPT_VIOLATION), Next::Run);
    assert_eq!(cpu.injected(), timer, "once more");
    cpu.set(vmcs::VECTORING, 0);
    assert_eq!(cpu.exit(reason::INTERRUPT_WINDOW), Next::Leave, "nor is the departure forgotten");
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::UnknownExit as u32));
}

/// An event that cannot be delivered, and that nothing raises again, is logged. The gate raises machine
/// checks and NMIs.
#[test]
fn an_event_that_cannot_be_delivered_does_not_keep_a_cpu() {
    crate::nested::tests::install::<Vmx>();
    let page_fault = event::VALID | event::EXCEPTION | event::HAS_ERROR_CODE | 14;
    let is_told = [
        (event::VALID | 0xEC, true),
        (event::DEBUG, true),
        (page_fault, false),
        (event::MACHINE_CHECK, false),
        (event::INJECT_NMI, false),
    ];
    for (first, is_told) in is_told {
        let mut cpu = Cpu::attached();
        cpu.set(vmcs::VECTORING, first);
        assert_eq!(cpu.exit(60), Next::Run);
        assert_eq!(cpu.injected(), first);
        cpu.set(vmcs::EXIT_QUALIFICATION, 2);
        cpu.set(vmcs::GUEST_PHYSICAL_ADDRESS, crate::nested::tests::BEYOND);
        assert_eq!(cpu.exit(reason::EPT_VIOLATION), Next::Leave);
        let raised = (cpu.area.cpu.gate.machine_check != 0, cpu.area.cpu.gate.nmi.pending);
        let lost = cpu.area.shared().log.iter().find(|record| record.kind == LogKind::EventLost as u32);
        let told = lost.map(|record| (record.arguments[0], record.arguments[1]));
        let exit_code = EXIT_CODE_VMX | u64::from(reason::EPT_VIOLATION);
        assert_eq!(told, is_told.then_some((first, exit_code)));
        assert_eq!(raised, (first == event::MACHINE_CHECK, u64::from(first == event::INJECT_NMI)));
    }
}

/// A pending departure does not depend on the guest's next exit, for there may be none.
#[test]
fn a_departure_waits_no_longer_than_for_interrupts() {
    for machine_check in [false, true] {
        let mut cpu = Cpu::attached();
        cpu.set(vmcs::VECTORING, event::VALID | 0xEC);
        if machine_check {
            cpu.machine_check_in_an_exit();
        }
        assert_eq!(cpu.exit(60), Next::Run);
        assert!(cpu.awaits_window());
        cpu.set(vmcs::VECTORING, 0);
        assert_eq!(cpu.exit(reason::INTERRUPT_WINDOW), Next::Leave);
        assert_eq!(cpu.area.cpu.gate.machine_check != 0, machine_check);
    }
}

/// The interrupt window would open again and again where the gate cannot go.
#[test]
fn a_window_opens_once() {
    let mut cpu = Cpu::attached();
    cpu.area.cpu.features |= feature::ISOLATED;
    cpu.set(vmcs::VECTORING, event::VALID | 0xEC);
    assert_eq!(cpu.exit(60), Next::Run);
    cpu.set(vmcs::VECTORING, 0);
    cpu.user_mode();
    assert_eq!(cpu.exit(reason::INTERRUPT_WINDOW), Next::Run);
    assert!(!cpu.awaits_window());
    assert_ne!(cpu.area.cpu.leave_pending, 0, "it leaves from the kernel");
}

/// A machine check that takes the place of the event does not make the CPU forget its departure.
#[test]
fn a_departure_waits_behind_a_machine_check_too() {
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::GUEST_CR4, CR4 | LASS);
    cpu.machine_check_in_an_exit();
    assert_eq!(cpu.exit(reason::VMCLEAR), Next::Run, "the fault has no native counterpart");
    assert_eq!(cpu.injected(), event::MACHINE_CHECK);
    assert!(cpu.awaits_window());
    assert_eq!(cpu.exit(reason::INTERRUPT_WINDOW), Next::Leave);
    assert_eq!((cpu.area.cpu.gate.machine_check, cpu.area.cpu.gate.outward.cr4), (0, CR4 | LASS));
}

/// A machine check of the hypervisor goes before a fault, which its instruction raises again.
#[test]
fn a_machine_check_in_an_exit_is_delivered_before_a_fault() {
    let mut cpu = Cpu::attached();
    cpu.machine_check_in_an_exit();
    assert_eq!(cpu.exit(reason::VMCLEAR), Next::Run);
    assert_eq!((cpu.injected(), cpu.get(vmcs::GUEST_RIP)), (event::MACHINE_CHECK, RIP));
    assert_eq!(cpu.exit(reason::VMCLEAR), Next::Run);
    assert_eq!(cpu.injected(), event::INVALID_OPCODE, "delivered once");
    assert_eq!(cpu.area.cpu.gate.machine_check, 0);
}

/// A machine check goes after an event that nothing raises again, at the next moment that the processor
/// reports.
#[test]
fn a_machine_check_waits_for_an_event_and_no_longer() {
    let mut cpu = Cpu::attached();
    for first in [event::VALID | 0xEC, event::DEBUG, event::INJECT_NMI] {
        cpu.set(vmcs::VECTORING, first);
        cpu.machine_check_in_an_exit();
        assert_eq!(cpu.hypercall(Hypercall::Ping as u64), Next::Run);
        assert_eq!(cpu.injected(), first);
        assert!(cpu.awaits_window());
        cpu.set(vmcs::VECTORING, 0);
        assert_eq!(cpu.exit(reason::INTERRUPT_WINDOW), Next::Run);
        assert_eq!(cpu.injected(), event::MACHINE_CHECK);
        assert!(!cpu.awaits_window());
    }
}

/// On the way to the entry no code reads the note any more: the handler hands the machine check over itself.
#[test]
fn a_machine_check_on_the_way_to_the_guest_is_injected_at_once() {
    let mut cpu = Cpu::attached();
    assert_eq!(cpu.hypercall(Hypercall::Ping as u64), Next::Run);
    cpu.machine_check();
    assert_eq!(cpu.injected(), event::MACHINE_CHECK);
    // An entry that fails has delivered no event.
    assert_eq!(cpu.exit(reason::ENTRY_FAILED | reason::INVALID_STATE), Next::Leave);
    assert_ne!(cpu.area.cpu.gate.machine_check, 0);
}

/// The processor reports a machine check in the entry itself, and the guest goes on.
#[test]
fn a_machine_check_in_an_entry_is_delivered_to_the_guest() {
    let mut cpu = Cpu::attached();
    assert_eq!(cpu.exit(reason::ENTRY_FAILED | reason::MACHINE_CHECK), Next::Run);
    assert_eq!(cpu.injected(), event::MACHINE_CHECK);
    assert_eq!(cpu.area.shared().crash.code, 0);
    let mut cpu = Cpu::attached();
    cpu.area.cpu.entered = 0;
    assert_eq!(cpu.exit(reason::ENTRY_FAILED | reason::MACHINE_CHECK), Next::Leave, "the attach fails");
    assert_ne!(cpu.area.cpu.gate.machine_check, 0);
}

/// The gate raises a machine check that the guest has not got, on each way of leaving.
#[test]
fn a_machine_check_outlives_every_departure() {
    let leave: [fn(&mut Cpu) -> Next; 4] = [
        |cpu| cpu.hypercall(Hypercall::Detach as u64),
        |cpu| cpu.exit(60),
        |cpu| {
            machine_check::finish(&mut cpu.area, &mut cpu.hardware, Next::Run);
            cpu.exit(reason::ENTRY_FAILED | reason::INVALID_STATE)
        },
        |cpu| {
            capture::put_back_native(&mut cpu.area, &mut cpu.hardware, Code::Ok);
            machine_check::finish(&mut cpu.area, &mut cpu.hardware, Next::Leave)
        },
    ];
    for (number, leave) in leave.iter().enumerate() {
        let mut cpu = Cpu::attached();
        cpu.machine_check_in_an_exit();
        assert_eq!(leave(&mut cpu), Next::Leave, "{number}");
        assert_ne!(cpu.area.cpu.gate.machine_check, 0, "{number}");
        // Out of VMX operation there is no guest to give it to.
        cpu.machine_check();
        assert_ne!(cpu.area.cpu.gate.machine_check, 0, "{number}");
    }
}

/// A machine check during an attach is the guest's first event.
#[test]
fn a_machine_check_during_an_attach_is_delivered_to_the_guest() {
    let mut cpu = Cpu::native();
    cpu.area.cpu.phase = Phase::Native;
    cpu.machine_check();
    assert_eq!(capture::attach(&mut cpu.area, &mut cpu.hardware), Ok(()));
    machine_check::finish(&mut cpu.area, &mut cpu.hardware, Next::Run);
    assert_eq!(cpu.injected(), event::MACHINE_CHECK);
}

/// A CPU that is reset has no use for a machine check, and could not take it.
#[test]
fn a_reset_forgets_machine_checks() {
    let mut cpu = Cpu::attached();
    cpu.machine_check_in_an_exit();
    assert_eq!(cpu.exit(reason::INIT), Next::Run);
    assert_eq!((cpu.injected(), cpu.area.cpu.gate.machine_check), (0, 0));
    cpu.machine_check();
    assert_eq!(cpu.injected(), 0, "not before it has started");
    assert_eq!(cpu.exit(reason::SIPI), Next::Run);
    assert_eq!(cpu.injected(), event::MACHINE_CHECK);
}

/// The quick answer does not check for machine checks at its end, so it does not begin with one. The gate
/// raises one that strikes meanwhile.
#[test]
fn a_machine_check_is_no_case_for_the_short_way() {
    let quick = |cpu: &mut Cpu, call: Hypercall| {
        *cpu.register(RAX) = call as u64;
        *cpu.register(RCX) = HYPERCALL_MAGIC;
        cpu.set(vmcs::EXIT_REASON, u64::from(reason::VMCALL));
        super::quick::answer(&mut cpu.area, &mut cpu.hardware)
    };
    let mut cpu = Cpu::attached();
    assert_eq!(quick(&mut cpu, Hypercall::Ping), Quick::Run);
    cpu.machine_check();
    assert_eq!(quick(&mut cpu, Hypercall::Ping), Quick::Slow);

    let mut cpu = Cpu::attached();
    assert_eq!(quick(&mut cpu, Hypercall::Detach), Quick::Leave);
    cpu.machine_check();
    assert_ne!(cpu.area.cpu.gate.machine_check, 0);
}

/// Linear-address separation: what a later kernel may set.
const LASS: u64 = 1 << 27;

/// A bit of CR4 that a later kernel sets: the processor took it, so the CPU leaves with it and without a
/// record, after the instruction that was answered.
#[test]
fn foreign_bits_of_cr4_let_go_without_a_crash() {
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::GUEST_CR4, CR4 | LASS);
    assert_eq!(cpu.exit(reason::INVD), Next::Leave);
    assert_eq!((cpu.area.cpu.gate.outward.rip, cpu.area.cpu.gate.outward.cr4), (RIP + 3, CR4 | LASS));
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::Cr4Unsupported as u32));
    assert_eq!(cpu.area.shared().crash.code, 0);

    let mut cpu = Cpu::attached();
    cpu.set(vmcs::GUEST_CR4, CR4 | LASS);
    assert_eq!(cpu.exit(reason::VMCLEAR), Next::Run, "the fault has no native counterpart");
    assert_eq!(cpu.injected(), event::INVALID_OPCODE);
    assert_eq!(cpu.exit(reason::VMCLEAR), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.cr4, CR4 | LASS);
}

#[test]
fn foreign_bits_of_cr4_survive_a_detach() {
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::GUEST_CR4, CR4 | LASS);
    assert_eq!(cpu.hypercall(Hypercall::Detach as u64), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.cr4, CR4 | LASS);
}

/// If the processor refused a VMCS, none of its bits can be trusted: the gate gets no bit that may fault
/// there.
#[test]
fn a_corrupt_cr4_is_not_carried_out() {
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::GUEST_CR4, CR4 | 1 << 63);
    assert_eq!(cpu.exit(reason::ENTRY_FAILED | reason::INVALID_STATE), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.cr4, CR4);
    assert_ne!(cpu.area.shared().crash.code, 0);
}

/// While a CPU leaves, the hypervisor's tables are in use, and they have NX bits. So the gate loads an EFER
/// without NXE.
#[test]
fn the_hypervisors_efer_keeps_what_it_needs() {
    const NXE: u64 = 1 << 11;
    let mut cpu = Cpu::attached();
    cpu.hardware.efer_must = NXE;
    cpu.set(vmcs::GUEST_EFER, LINUX_EFER & !NXE);
    assert_eq!(cpu.hypercall(Hypercall::Detach as u64), Next::Leave);
    assert_eq!(
        (cpu.hardware.msrs[&msr::EFER], cpu.area.cpu.gate.outward.efer),
        (LINUX_EFER, LINUX_EFER & !NXE)
    );

    let mut cpu = Cpu::attached();
    cpu.hardware.efer_must = NXE;
    cpu.area.cpu.gate.outward.efer = LINUX_EFER;
    cpu.set(vmcs::GUEST_EFER, 0);
    assert_eq!(cpu.exit(reason::ENTRY_FAILED | reason::INVALID_STATE), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.efer, 0, "a corrupt one is dropped");
}

#[test]
fn an_nmi_in_delivery_can_be_injected_again() {
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::VECTORING, event::INJECT_NMI);
    cpu.set(vmcs::GUEST_INTERRUPTIBILITY, blocking::NMI);
    assert_eq!(cpu.hypercall(Hypercall::Ping as u64), Next::Run);
    assert_eq!(cpu.injected(), event::INJECT_NMI);
    assert_eq!(cpu.get(vmcs::GUEST_INTERRUPTIBILITY), 0);
}

#[test]
fn an_iret_that_faulted_has_nmis_blocked_again() {
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::EXIT_QUALIFICATION, 1 << 12 | 2);
    // There are no tables: the CPU leaves, with NMIs blocked as they are in the processor.
    let _ = cpu.exit(reason::EPT_VIOLATION);
    assert_eq!(cpu.hardware.fields[&vmcs::GUEST_INTERRUPTIBILITY], blocking::NMI);
}

#[test]
fn init_and_start_up_bring_a_cpu_to_real_mode() {
    let mut cpu = Cpu::attached();
    cpu.hardware.leaves.insert(1, [0x606A6, 0, 0, 0]);
    assert_eq!(cpu.exit(reason::INIT), Next::Run);
    assert_eq!(cpu.get(vmcs::GUEST_ACTIVITY), activity::WAIT_FOR_SIPI);
    assert_eq!((cpu.get(vmcs::GUEST_CR0), cpu.get(vmcs::CR0_SHADOW)), (0x30, 0x10));
    assert_eq!((cpu.get(vmcs::GUEST_CR4), cpu.get(vmcs::CR4_SHADOW)), (1 << 13, 0));
    assert_eq!(cpu.get(vmcs::ENTRY_CONTROLS) & u64::from(entry::IA32E_MODE_GUEST), 0);
    assert_eq!((*cpu.register(RDX), *cpu.register(RBX)), (0x606A6, 0));
    cpu.set(vmcs::EXIT_QUALIFICATION, 0x9A);
    assert_eq!(cpu.exit(reason::SIPI), Next::Run);
    assert_eq!((cpu.get(vmcs::GUEST_CS_SELECTOR), cpu.get(vmcs::GUEST_RIP)), (0x9A00, 0));
    assert_eq!(cpu.get(vmcs::GUEST_ES_BASE + 2), 0x9_A000);
    assert_eq!(cpu.get(vmcs::GUEST_ACTIVITY), activity::ACTIVE);
    let allowed = good_xeon(0).vmx_cr4_fixed1;
    assert_eq!(refusal::first(allowed, &mut cpu.hardware).0, Refusal::UnknownState, "an entry would succeed");
    // Into long mode by a write that exits.
    cpu.set(vmcs::GUEST_EFER, 0x100);
    cpu.set(vmcs::GUEST_CR4, 1 << 13 | 1 << 5);
    assert_eq!(write_control(&mut cpu, 0, 0x8000_0011), Next::Run);
    assert_eq!(cpu.get(vmcs::GUEST_EFER), 0x500);
    assert_ne!(cpu.get(vmcs::ENTRY_CONTROLS) & u64::from(entry::IA32E_MODE_GUEST), 0);
}

/// The boot processor would begin in firmware.
#[test]
fn init_shuts_the_boot_processor_down() {
    let mut cpu = Cpu::attached();
    cpu.hardware.msrs.insert(msr::APIC_BASE, 0xFEE0_0900);
    let _ = cpu.exit(reason::INIT);
    assert!(cpu.hardware.shut_down && !cpu.hardware.vmx_on);
}

/// Returns a CPU with a kernel that tracks its branches, on a processor that can carry that.
fn tracking() -> Cpu {
    let mut cpu = Cpu::native();
    let mut facts = good_xeon(0);
    facts.cr4 |= cr4::CET;
    facts.cpuid_7_0.ecx |= 1 << 7;
    facts.vmx_exit_controls |= u64::from(exit::LOAD_CET) << 32;
    facts.vmx_entry_controls |= u64::from(entry::LOAD_CET) << 32;
    facts.vmx_cr4_fixed1 |= cr4::CET;
    cpu.area.cpu.features = capture::features(&facts);
    capture::learn(&mut cpu.area, &facts);
    cpu.hardware.msrs.extend([(msr::S_CET, 4), (msr::ISST_ADDR, 0x1234), (msr::U_CET, 0)]);
    cpu
}

#[test]
fn branch_tracking_goes_with_the_kernel() {
    const WAITING: u64 = 1 << 11;
    let mut cpu = tracking();
    assert_eq!(capture::attach(&mut cpu.area, &mut cpu.hardware), Ok(()));
    assert_eq!((cpu.get(vmcs::GUEST_S_CET), cpu.get(vmcs::HOST_S_CET)), (4, 0));
    // An entry that was refused has loaded the hypervisor's state.
    cpu.hardware.msrs.extend([(msr::S_CET, 0), (msr::ISST_ADDR, 0)]);
    capture::put_back_native(&mut cpu.area, &mut cpu.hardware, Code::InvalidGuestState);
    assert_eq!((cpu.hardware.msrs[&msr::S_CET], cpu.hardware.msrs[&msr::ISST_ADDR]), (4, 0x1234));

    let mut cpu = tracking();
    assert_eq!(capture::attach(&mut cpu.area, &mut cpu.hardware), Ok(()));
    cpu.hardware.msrs.extend([(msr::S_CET, 0), (msr::ISST_ADDR, 0), (msr::FS_BASE, 0), (msr::GS_BASE, 0)]);
    cpu.area.cpu.entered = 1;
    cpu.set(vmcs::GUEST_S_CET, 4 | WAITING);
    assert_eq!(cpu.exit(60), Next::Leave);
    assert_eq!(cpu.hardware.msrs[&msr::S_CET], 4, "the gate's next instruction is no ENDBR");
}

#[test]
fn real_mode_has_no_error_codes() {
    let mut cpu = Cpu::attached();
    assert_eq!(cpu.exit(reason::INIT), Next::Run);
    assert_eq!(access_msr(&mut cpu, 0x4000_0000, None), Next::Run);
    assert_eq!(cpu.injected(), event::GENERAL_PROTECTION & !event::HAS_ERROR_CODE);
}

#[test]
fn a_cpu_in_real_mode_shuts_down_instead_of_leaving() {
    for code in [reason::TRIPLE_FAULT, 60] {
        let mut cpu = Cpu::attached();
        if code == 60 {
            assert_eq!(cpu.exit(reason::INIT), Next::Run);
        }
        let _ = cpu.exit(code);
        assert!(cpu.hardware.shut_down && !cpu.hardware.vmx_on);
        assert_eq!(cpu.area.shared().left_because, u64::from(Code::CpuReset as u32));
    }
}

/// Returns a CPU in user mode under page-table isolation, and the access rights of SS in the kernel.
fn isolated() -> (Cpu, u64) {
    let mut cpu = Cpu::attached();
    cpu.area.cpu.features |= feature::ISOLATED;
    let kernel = cpu.get(vmcs::GUEST_SS_RIGHTS);
    cpu.user_mode();
    (cpu, kernel)
}

/// User mode's own tables do not map the gate: the CPU leaves from the kernel. An instruction that user
/// mode repeats gets #UD.
#[test]
fn page_table_isolation_leaves_from_the_kernel() {
    let (mut cpu, kernel) = isolated();
    cpu.set(vmcs::GUEST_CR3, 0x1234_5000);
    assert_eq!(cpu.exit(60), Next::Run);
    assert_eq!(cpu.injected(), 0);
    assert_eq!(cpu.exit(60), Next::Run);
    assert_eq!(cpu.injected(), event::INVALID_OPCODE);
    // The kernel's first instructions run on user mode's tables.
    cpu.set(vmcs::GUEST_SS_RIGHTS, kernel);
    assert_eq!(cpu.exit(reason::MONITOR_TRAP), Next::Run);
    cpu.set(vmcs::GUEST_CR3, 0x1234_4000);
    assert_eq!(cpu.exit(reason::CPUID), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.rip, RIP, "the instruction runs natively");
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::UnknownExit as u32));
}

/// The gate cannot go where user mode is, under page-table isolation. The entry is tried once more, with
/// the fields repaired that the guest itself can make wrong.
#[test]
fn a_refused_entry_into_user_mode_is_repaired_and_leaves_from_the_kernel() {
    let (mut cpu, kernel) = isolated();
    cpu.set(vmcs::GUEST_CS_RIGHTS, 0xC0FB);
    cpu.set(vmcs::GUEST_RIP, 1 << 32);
    cpu.set(vmcs::ENTRY_INTERRUPTION, event::INVALID_OPCODE);
    assert_eq!(cpu.exit(reason::ENTRY_FAILED | reason::INVALID_STATE), Next::Run);
    assert_eq!((cpu.get(vmcs::GUEST_RIP), cpu.injected()), (0, 0));
    cpu.set(vmcs::GUEST_SS_RIGHTS, kernel);
    cpu.set(vmcs::GUEST_CR3, 0x1234_4000);
    assert_eq!(cpu.exit(reason::CPUID), Next::Leave);
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::InvalidGuestState as u32));
    // If the repair does not help, nothing does.
    let (mut cpu, _) = isolated();
    assert_eq!(cpu.exit(reason::ENTRY_FAILED | reason::INVALID_STATE), Next::Run);
    let _ = cpu.exit(reason::ENTRY_FAILED | reason::INVALID_STATE);
    assert!(cpu.hardware.shut_down);
}

#[test]
fn a_refused_first_entry_rolls_back() {
    let mut cpu = Cpu::attached();
    cpu.area.cpu.entered = 0;
    cpu.set(vmcs::GUEST_EFER, LINUX_EFER & !0x400);
    assert_eq!(cpu.exit(reason::ENTRY_FAILED | reason::INVALID_STATE), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.detail, [Refusal::EferLma as u64, LINUX_EFER & !0x400]);
    assert!(!cpu.hardware.vmx_on);
    let outward = &cpu.area.cpu.gate.outward;
    assert_eq!((outward.rip, outward.registers[0]), (RIP, Code::InvalidGuestState as u64));
    assert_eq!(outward.thread_bases, [0x7FFF_F7D8_0740, 0xFFFF_8880_7DC0_0000]);
    assert_eq!(cpu.hardware.msrs[&msr::SYSENTER_EIP], SYSENTER_EIP, "a failed entry loads host state too");
    assert_eq!(cpu.area.own.tr.selector, 0x40);
}

#[test]
fn a_failed_instruction_is_named() {
    for (invalid, error, expected) in
        [(0, 7, Refusal::InvalidControls), (0, 8, Refusal::InvalidHostState), (1, 0, Refusal::NoCurrentVmcs)]
    {
        let mut cpu = Cpu::attached();
        cpu.area.cpu.entered = 0;
        (cpu.area.own.failed, cpu.area.own.failed_invalid) = (1, invalid);
        cpu.set(vmcs::VM_INSTRUCTION_ERROR, error);
        assert_eq!(cpu.exit(reason::VMCALL), Next::Leave, "the reason is that of an earlier exit");
        assert_eq!(cpu.area.cpu.gate.detail[0], expected as u64);
    }
}

#[test]
fn a_refused_later_entry_lets_the_machine_run_on() {
    let mut cpu = Cpu::attached();
    cpu.set(vmcs::GUEST_EFER, 0);
    cpu.set(vmcs::ENTRY_INTERRUPTION, event::VALID | event::NMI | 2);
    assert_eq!(cpu.exit(reason::ENTRY_FAILED | reason::INVALID_STATE), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.rip, RIP);
    assert_eq!(cpu.area.cpu.gate.nmi.pending, 1, "the gate raises what was not delivered");
    let crash = cpu.area.shared().crash;
    assert_eq!(crash.code, Code::InvalidGuestState as u32);
    let message = String::from_utf8_lossy(&crash.message);
    assert!(
        message.starts_with("refused entry: EFER.LMA differs from the IA-32e-mode control (0x0)"),
        "{message}"
    );
}

#[test]
fn each_check_of_the_guests_state_has_a_name() {
    type Corrupt = fn(&mut Cpu);
    let corruptions: [(Refusal, Corrupt); 21] = [
        (Refusal::Cr0Fixed, |cpu| cpu.set(vmcs::GUEST_CR0, 1 << 32 | 0x8005_0033)),
        (Refusal::Cr0Fixed, |cpu| cpu.set(vmcs::GUEST_CR0, 0x8005_0013)),
        (Refusal::PagingWithoutProtection, |cpu| cpu.set(vmcs::GUEST_CR0, 0x8005_0032)),
        (Refusal::Cr4Fixed, |cpu| cpu.set(vmcs::GUEST_CR4, CR4 | 1 << 63)),
        (Refusal::Cr4Fixed, |cpu| cpu.set(vmcs::GUEST_CR4, CR4 & !(1 << 13))),
        (Refusal::LongModeWithoutPaging, |cpu| cpu.set(vmcs::GUEST_CR4, CR4 & !(1 << 5))),
        (Refusal::Cr3Width, |cpu| cpu.set(vmcs::GUEST_CR3, 1 << 60)),
        (Refusal::Dr7High, |cpu| cpu.set(vmcs::GUEST_DR7, 1 << 32)),
        (Refusal::SysenterNotCanonical, |cpu| cpu.set(vmcs::GUEST_SYSENTER_EIP, 1 << 55)),
        (Refusal::IllegalPat, |cpu| cpu.set(vmcs::GUEST_PAT, 2)),
        (Refusal::EferReserved, |cpu| cpu.set(vmcs::GUEST_EFER, LINUX_EFER | 1 << 20)),
        (Refusal::EferLma, |cpu| cpu.set(vmcs::GUEST_EFER, 0)),
        (Refusal::CodeSegment, |cpu| cpu.set(vmcs::GUEST_CS_RIGHTS, 0xE09B)),
        (Refusal::StackSegment, |cpu| cpu.set(vmcs::GUEST_SS_RIGHTS, 0xC09B)),
        (Refusal::DataSegment, |cpu| cpu.set(vmcs::GUEST_ES_RIGHTS, 0x13)),
        (Refusal::TaskRegister, |cpu| cpu.set(vmcs::GUEST_TR_RIGHTS, 0x89)),
        (Refusal::LdtRegister, |cpu| cpu.set(vmcs::GUEST_LDTR_RIGHTS, 0x8B)),
        (Refusal::DescriptorTable, |cpu| cpu.set(vmcs::GUEST_GDTR_LIMIT, 1 << 16)),
        (Refusal::Rip, |cpu| cpu.set(vmcs::GUEST_RIP, 1 << 55)),
        (Refusal::Rflags, |cpu| cpu.set(vmcs::GUEST_RFLAGS, 0)),
        (Refusal::LinkPointer, |cpu| cpu.set(vmcs::VMCS_LINK_POINTER, 0)),
    ];
    for (expected, corrupt) in corruptions {
        let mut cpu = Cpu::attached();
        corrupt(&mut cpu);
        assert_eq!(refusal::first(good_xeon(0).vmx_cr4_fixed1, &mut cpu.hardware).0, expected);
    }
}

#[test]
fn the_trap_flag_does_not_outlive_its_exit() {
    let mut cpu = Cpu::attached();
    let controls = cpu.get(vmcs::PRIMARY_CONTROLS);
    cpu.set(vmcs::PRIMARY_CONTROLS, controls | u64::from(primary::MONITOR_TRAP_FLAG));
    assert_eq!(cpu.exit(reason::MONITOR_TRAP), Next::Run);
    assert_eq!(cpu.get(vmcs::PRIMARY_CONTROLS), controls);
    assert_eq!(cpu.get(vmcs::GUEST_RIP), RIP);
}

#[test]
fn descriptors_of_a_departure() {
    let tr =
        SystemSegment { selector: 0x40, attributes: 0x8B, limit: 0x4087, base_virt: 0xFFFF_FE12_3456_7000 };
    assert_eq!(tr.descriptor(), [0x3400_8B56_7000_4087, 0xFFFF_FE12]);
    let large = SystemSegment { attributes: 0x8082, limit: 0xF_FFFF, ..tr };
    assert_eq!(large.descriptor()[0] & 0x00FF_0000_0000_FFFF, 0x0080_0000_0000_00FF);
    let mut table = LeaveGdt::new();
    table.put(&tr);
    table.put(&SystemSegment { selector: 0x18, ..tr });
    assert_eq!((table.0[8], table.0[9]), (tr.descriptor()[0], 0xFFFF_FE12));
    assert_eq!(table.0[3], crate::host::tables::DATA_DESCRIPTOR, "the fixed ones stay");
}

#[test]
fn no_translation_outlives_without_vpid_either() {
    let mut cpu = Cpu::native();
    cpu.area.own.controls.secondary &= !secondary::VPID;
    assert_eq!(capture::attach(&mut cpu.area, &mut cpu.hardware), Ok(()));
    assert_eq!((cpu.hardware.flushes, cpu.hardware.fields.get(&vmcs::VPID)), (1, None));
}

proptest! {
    /// The VMCS has any live state. The processor's checks pass it if they passed the original. A detach at
    /// once gives every bit back.
    #[test]
    fn attach_and_detach_is_the_identity(
        rip in any::<u32>(), rsp in any::<u32>(), flags in 0u64..0x800, cr3 in 0u64..1 << 40,
        bases in any::<[u32; 5]>(), limits in any::<[u16; 3]>(), fs in 0u16..8, ldt in any::<bool>(),
        debugctl in 0u64..4, pat in proptest::collection::vec(prop_oneof![0u8..2, 4u8..8], 8),
    ) {
        const KERNEL: u64 = 0xFFFF_FFFF_0000_0000;
        let mut cpu = Cpu::native();
        let pat = u64::from_le_bytes(pat.try_into().unwrap_or_default());
        let inward = &mut cpu.area.cpu.gate.inward;
        inward.rip = KERNEL | u64::from(rip);
        inward.rsp = KERNEL | u64::from(rsp);
        // No single step, no interrupts.
        inward.rflags = flags & !0x300 & !0x28 | 2;
        inward.cr3 = cr3;
        inward.tr_base_virt = KERNEL | u64::from(bases[0]);
        inward.tr.limit = u32::from(limits[0]);
        (inward.gdtr.limit, inward.idtr.limit) = (limits[1], limits[2]);
        if fs > 3 {
            let selector = fs << 3 | 3;
            inward.fs = Segment { selector, attributes: 0xC0F3, limit: u32::MAX, ..Segment::default() };
        }
        if ldt {
            inward.ldtr = Segment { selector: 0x50, attributes: 0x82, limit: 0xFFFF, ..Segment::default() };
            inward.ldtr_base_virt = KERNEL | u64::from(bases[1]);
        }
        let before = *inward;
        let msrs = [
            (msr::FS_BASE, u64::from(bases[2])), (msr::GS_BASE, KERNEL | u64::from(bases[3])),
            (msr::SYSENTER_EIP, KERNEL | u64::from(bases[4])), (msr::DEBUGCTL, debugctl), (msr::PAT, pat),
        ];
        cpu.hardware.msrs.extend(msrs);
        let all_before = cpu.hardware.msrs.clone();
        prop_assert_eq!(capture::attach(&mut cpu.area, &mut cpu.hardware), Ok(()));
        let found = refusal::first(good_xeon(0).vmx_cr4_fixed1, &mut cpu.hardware);
        prop_assert_eq!(found, (Refusal::UnknownState, 0));
        // State that an exit loads.
        for index in [msr::FS_BASE, msr::GS_BASE, msr::DEBUGCTL] {
            cpu.hardware.msrs.insert(index, 0);
        }
        capture::put_back(&mut cpu.area, &mut cpu.hardware);
        let outward = cpu.area.cpu.gate.outward;
        prop_assert_eq!((outward.rip, outward.registers[4]), (before.rip, before.rsp));
        prop_assert_eq!((outward.rflags, outward.cr3, outward.cr4), (before.rflags, before.cr3, before.cr4));
        prop_assert_eq!(outward.cr0, cpu.area.cpu.guest_cr0);
        prop_assert_eq!((outward.gdtr, outward.idtr), (before.gdtr, before.idtr));
        let segments = [before.es, before.cs, before.ss, before.ds];
        let selectors = segments.map(|segment| u64::from(segment.selector));
        prop_assert_eq!(outward.selectors, selectors);
        prop_assert_eq!(outward.thread_selectors, [u64::from(before.fs.selector), 0]);
        let system = |segment: &SystemSegment| (segment.selector, segment.limit, segment.base_virt);
        prop_assert_eq!(system(&cpu.area.own.tr), (0x40, before.tr.limit, before.tr_base_virt));
        let ldtr = (before.ldtr.selector, before.ldtr.limit, before.ldtr_base_virt);
        prop_assert_eq!(system(&cpu.area.own.ldtr), ldtr);
        prop_assert_eq!(cpu.area.own.ldtr.is_usable(), ldt);
        // The gate writes the bases.
        cpu.hardware.msrs.extend([msr::FS_BASE, msr::GS_BASE].into_iter().zip(outward.thread_bases));
        prop_assert_eq!(cpu.hardware.msrs, all_before);
    }

    /// No exit reason, qualification or register makes the handler panic. Each exit resumes, leaves at the
    /// instruction or after it, or ends in the processor's shutdown.
    #[test]
    fn any_exit_is_answered(
        code in 0u32..80, qualification in any::<u64>(), vectoring in any::<u32>(), user in any::<bool>(),
        isolated in any::<bool>(), registers in any::<[u64; 16]>(),
    ) {
        let mut cpu = Cpu::attached();
        cpu.area.cpu.gate.outward.registers = registers;
        cpu.set(vmcs::EXIT_QUALIFICATION, qualification);
        cpu.set(vmcs::VECTORING, u64::from(vectoring));
        if user {
            cpu.user_mode();
        }
        if isolated {
            cpu.area.cpu.features |= feature::ISOLATED;
        }
        if cpu.exit(code) == Next::Leave {
            prop_assert!(!cpu.hardware.vmx_on);
            prop_assert!(cpu.hardware.shut_down || [RIP, RIP + 3].contains(&cpu.area.cpu.gate.outward.rip));
        } else {
            prop_assert!(cpu.hardware.vmx_on);
        }
    }

    /// Any injected event has the reserved bits clear. Software's events are left to their instruction.
    #[test]
    fn events_handed_over_are_legal(
        kind in 0u64..8,
        vector in 0u64..256,
        with_code in any::<bool>(),
        code in any::<u16>(),
    ) {
        prop_assume!(kind != 1 && kind != 7);
        let mut cpu = Cpu::attached();
        let info = event::VALID | 1 << 12 | kind << 8 | u64::from(with_code) << 11 | vector;
        cpu.set(vmcs::VECTORING, info);
        cpu.set(vmcs::VECTORING_ERROR_CODE, u64::from(code));
        prop_assert_eq!(cpu.hypercall(Hypercall::Ping as u64), Next::Run);
        let injected = cpu.injected();
        if [4, 5, 6].contains(&kind) {
            prop_assert_eq!(injected & event::VALID, 0);
        } else {
            prop_assert_eq!(injected, info & !(1 << 12));
            prop_assert!(!with_code || cpu.hardware.vmread(vmcs::ENTRY_ERROR_CODE) == u64::from(code));
        }
    }
}
