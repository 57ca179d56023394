//! Exits on a model processor: every answer, and the state after a departure.

use mercury_abi::code::Code;
use mercury_abi::gate::{HYPERCALL_MAGIC, Hypercall};
use mercury_abi::shared::{ExitReason, LogKind};
use mercury_abi::snapshot::{SnapshotCall, SnapshotStatus};
use mercury_preflight::bits::efer;
use proptest::prelude::*;

use super::guests;
use super::vmcb::{
    INTERCEPT_CR3_WRITE, INTERCEPT_MISC1, INTERCEPT_VINTR, TLB_FLUSH_ALL, VIRTUAL_INTERRUPT, event, exit_code,
};
use crate::address::HostPhys;
use crate::cpu::Phase;
use crate::host::entry::Next;
use crate::model::{Attached, LINUX_EFER, LINUX_PAT};
use crate::quick::Quick;
use crate::snapshot::{live, tests::WIDE};
use crate::x86::{DR6_BS, RFLAGS_RF, RFLAGS_TF, msr};
use crate::{machine_check, speculation};

const RCX: usize = 1;
const RDX: usize = 2;
const RSI: usize = 6;
const RDI: usize = 7;

fn hypercall(cpu: &mut Attached, call: u64) -> Next {
    *cpu.register(0) = call;
    *cpu.register(RCX) = HYPERCALL_MAGIC;
    cpu.exit(exit_code::VMMCALL)
}

fn write_msr(cpu: &mut Attached, index: u32, value: u64) -> Next {
    *cpu.register(0) = value & 0xFFFF_FFFF;
    *cpu.register(RDX) = value >> 32;
    *cpu.register(RCX) = u64::from(index);
    cpu.area.control.exit_info1 = 1;
    cpu.exit(exit_code::MSR)
}

fn read_msr(cpu: &mut Attached, index: u32) -> Next {
    *cpu.register(RCX) = u64::from(index);
    cpu.area.control.exit_info1 = 0;
    cpu.exit(exit_code::MSR)
}

fn count(cpu: &mut Attached, reason: ExitReason) -> u64 {
    cpu.area.shared().exits[reason as usize]
}

#[test]
fn ping_answers_and_moves_on() {
    let mut cpu = Attached::new();
    let rip = cpu.area.control.rip;
    assert_eq!(hypercall(&mut cpu, Hypercall::Ping as u64), Next::Run);
    assert_eq!(*cpu.register(0), 0);
    assert_eq!(*cpu.register(RDX), u64::from(mercury_abi::MERCURY_ABI_VERSION));
    assert_eq!(cpu.area.control.rip, rip + 3);
    assert_eq!(count(&mut cpu, ExitReason::Hypercall), 1);
}

#[test]
fn unknown_hypercalls_are_refused_and_without_the_magic_are_undefined() {
    let mut cpu = Attached::new();
    assert_eq!(hypercall(&mut cpu, 77), Next::Run);
    assert_eq!(*cpu.register(0), Code::UnknownOperation as u64);
    let rip = cpu.area.control.rip;
    *cpu.register(RCX) = 0;
    assert_eq!(cpu.exit(exit_code::VMMCALL), Next::Run);
    assert_eq!(cpu.area.control.inject_event, event::INVALID_OPCODE);
    assert_eq!(cpu.area.control.rip, rip);
    assert_eq!(count(&mut cpu, ExitReason::ForeignHypercall), 1);
}

#[test]
fn flush_asks_for_an_acknowledged_flush() {
    let mut cpu = Attached::new();
    assert_eq!(hypercall(&mut cpu, Hypercall::Flush as u64), Next::Run);
    assert_eq!(cpu.area.control.tlb_control, TLB_FLUSH_ALL);
    assert_eq!(*cpu.register(0), 0);
}

#[test]
fn detach_gives_the_processor_back() {
    let mut cpu = Attached::new();
    let rip = cpu.area.control.rip;
    cpu.area.own.guest_hsave = 0;
    assert_eq!(hypercall(&mut cpu, Hypercall::Detach as u64), Next::Leave);
    let outward = &cpu.area.cpu.gate.outward;
    assert_eq!(outward.rip, rip + 3);
    assert_eq!(outward.registers[0], 0);
    assert_eq!(outward.registers[4], cpu.area.control.rsp);
    assert_eq!((outward.cr0, outward.cr3, outward.cr4), (0x8005_0033, 0x1234_5000, 0x6F0));
    assert_eq!(cpu.hardware.msrs[&msr::VM_HSAVE_PA], 0);
    assert_eq!(cpu.hardware.msrs[&msr::PAT], LINUX_PAT);
    assert_eq!(cpu.area.shared().left_because, 0);
}

#[test]
fn clearing_svme_or_the_save_area_is_a_departure_at_the_same_instruction() {
    for (index, value) in [(msr::EFER, LINUX_EFER), (msr::VM_HSAVE_PA, 0)] {
        let mut cpu = Attached::new();
        let rip = cpu.area.control.rip;
        assert_eq!(write_msr(&mut cpu, index, value), Next::Leave);
        assert_eq!(cpu.area.cpu.gate.outward.rip, rip);
        assert_eq!(cpu.area.cpu.gate.outward.registers[0], value & 0xFFFF_FFFF);
        assert_eq!(cpu.area.shared().left_because, u64::from(Code::SvmReleased as u32));
    }
}

#[test]
fn microcode_is_loaded_natively() {
    let mut cpu = Attached::new();
    let rip = cpu.area.control.rip;
    assert_eq!(write_msr(&mut cpu, msr::PATCH_LOADER, 0xFFFF_8880_0000_0000), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.rip, rip);
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::MicrocodeUpdate as u32));
}

#[test]
fn efer_writes_are_checked_as_the_processor_does() {
    let mut cpu = Attached::new();
    let attached = LINUX_EFER | msr::EFER_SVME;
    assert_eq!(write_msr(&mut cpu, msr::EFER, attached & !msr::EFER_LMA), Next::Run);
    assert_eq!(cpu.area.control.efer, attached, "LMA is read-only");
    assert_eq!(cpu.area.control.inject_event, 0);
    for illegal in [attached | 1 << 40, attached & !msr::EFER_LME] {
        let mut cpu = Attached::new();
        assert_eq!(write_msr(&mut cpu, msr::EFER, illegal), Next::Run);
        assert_eq!(cpu.area.control.inject_event, event::GENERAL_PROTECTION);
        assert_eq!(cpu.area.control.efer, attached);
    }
}

#[test]
fn pat_is_mirrored_and_checked() {
    let mut cpu = Attached::new();
    let reset = 0x0007_0406_0007_0406;
    assert_eq!(write_msr(&mut cpu, msr::PAT, reset), Next::Run);
    assert_eq!((cpu.area.control.g_pat, cpu.hardware.msrs[&msr::PAT]), (reset, reset));
    assert_eq!(write_msr(&mut cpu, msr::PAT, 0x02), Next::Run);
    assert_eq!(cpu.area.control.inject_event, event::GENERAL_PROTECTION);
    assert_eq!(cpu.area.control.g_pat, reset);
    cpu.area.control.inject_event = 0;
    assert_eq!(write_msr(&mut cpu, msr::PAT, 0x0007_0406_0007_0400), Next::Leave);
}

#[test]
fn msrs_outside_the_map_are_executed_for_real() {
    const SMCA_CTL0: u32 = 0xC000_2000;
    let mut cpu = Attached::new();
    cpu.hardware.msrs.insert(SMCA_CTL0, 0x1234_5678_9ABC_DEF0);
    let rip = cpu.area.control.rip;
    assert_eq!(read_msr(&mut cpu, SMCA_CTL0), Next::Run);
    assert_eq!((*cpu.register(0), *cpu.register(RDX)), (0x9ABC_DEF0, 0x1234_5678));
    assert_eq!(cpu.area.control.rip, rip + 2);
    assert_eq!(write_msr(&mut cpu, SMCA_CTL0, 7), Next::Run);
    assert_eq!(cpu.hardware.msrs[&SMCA_CTL0], 7);
    assert_eq!(read_msr(&mut cpu, 0xC000_3000), Next::Run);
    assert_eq!(cpu.area.control.inject_event, event::GENERAL_PROTECTION);
    assert_eq!(count(&mut cpu, ExitReason::MsrPassThrough), 3);
}

#[test]
fn a_single_step_over_an_intercepted_instruction_traps() {
    let mut cpu = Attached::new();
    cpu.area.control.rflags |= RFLAGS_TF;
    cpu.area.control.interrupt_shadow = 1;
    assert_eq!(hypercall(&mut cpu, Hypercall::Ping as u64), Next::Run);
    assert_eq!(cpu.area.control.inject_event, event::DEBUG);
    assert_ne!(cpu.area.control.dr6 & DR6_BS, 0);
    assert_eq!(cpu.area.control.interrupt_shadow, 0);
}

#[test]
fn the_processors_own_next_rip_is_used_where_there_is_one() {
    let mut cpu = Attached::new();
    cpu.area.cpu.features = super::capture::feature::NEXT_RIP;
    let rip = cpu.area.control.rip;
    cpu.area.control.next_rip = rip + 4;
    assert_eq!(hypercall(&mut cpu, Hypercall::Ping as u64), Next::Run);
    assert_eq!(cpu.area.control.rip, rip + 4);
}

#[test]
fn virtualization_instructions_are_undefined() {
    for code in [exit_code::VMRUN, exit_code::VMLOAD, 0x83, 0x84, 0x85, exit_code::SKINIT, exit_code::INVLPGA]
    {
        let mut cpu = Attached::new();
        assert_eq!(cpu.exit(code), Next::Run);
        assert_eq!(cpu.area.control.inject_event, event::INVALID_OPCODE, "{code:#x}");
        assert_ne!(cpu.area.control.rflags & RFLAGS_RF, 0, "a fault pushes RF");
        assert_eq!(count(&mut cpu, ExitReason::VirtInstruction), 1);
    }
}

#[test]
fn an_unknown_exit_lets_go_and_leaves_a_record() {
    let mut cpu = Attached::new();
    let rip = cpu.area.control.rip;
    assert_eq!(cpu.exit(0x402), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.rip, rip);
    let crash = cpu.area.shared().crash;
    assert_eq!((crash.code, crash.exit_code, crash.guest_rip), (Code::UnknownExit as u32, 0x402, rip));
    assert!(crash.message.starts_with(b"unknown exit 0x402\0"));
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::UnknownExit as u32));
    let kinds: Vec<u32> = cpu.area.shared().log.iter().map(|record| record.kind).take(2).collect();
    assert_eq!(kinds, [LogKind::Crash as u32, LogKind::Left as u32]);
}

#[test]
fn an_event_in_delivery_is_delivered_before_the_cpu_leaves() {
    let mut cpu = Attached::new();
    let timer = event::VALID | 0xEC;
    cpu.area.control.exit_event = timer;
    assert_eq!(cpu.exit(0x402), Next::Run, "the event has no native counterpart");
    assert_eq!(cpu.area.control.inject_event, timer);
    cpu.area.control.inject_event = 0;
    assert_eq!(cpu.exit(0x402), Next::Leave);
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::UnknownExit as u32));
}

/// Delivering the event may itself exit, on a stack or a table that nothing has touched before.
#[test]
fn an_event_is_not_lost_to_a_nested_fault_of_its_own_delivery() {
    crate::nested::tests::install::<super::Svm>();
    let mut cpu = Attached::new();
    let timer = event::VALID | 0xEC;
    cpu.area.control.exit_event = timer;
    assert_eq!(cpu.exit(0x402), Next::Run);
    assert_eq!(cpu.enter(), timer);
    (cpu.area.control.exit_event, cpu.area.control.exit_info1) = (timer, 6);
    cpu.area.control.exit_info2 = crate::nested::tests::UNTOUCHED;
    assert_eq!(cpu.exit(exit_code::NPF), Next::Run);
    assert_eq!(cpu.enter(), timer, "once more");
    assert_eq!(cpu.exit(exit_code::VINTR), Next::Leave, "nor is the departure forgotten");
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::UnknownExit as u32));
}

fn snapshot_call(cpu: &mut Attached, call: SnapshotCall, argument: u64) -> Next {
    *cpu.register(RDI) = call as u64;
    *cpu.register(RSI) = argument;
    hypercall(cpu, Hypercall::Snapshot as u64)
}

/// User mode can force nested faults. The world switch has forgotten predictions by then.
#[test]
fn beneath_a_snapshot_memory_is_mapped_for_the_answer_alone() {
    crate::nested::tests::install::<super::Svm>();
    let mut cpu = Attached::new();
    let _ = snapshot_call(&mut cpu, SnapshotCall::Tables, WIDE);
    cpu.area.cpu.barriers = speculation::IBPB;
    for (tables, mappings) in [(0, vec![]), (live::ON_SNAPSHOT, vec![None]), (live::ON_LOG, vec![None; 2])] {
        cpu.area.cpu.on_snapshot = tables;
        (cpu.area.control.exit_info1, cpu.area.control.exit_info2) = (6, crate::nested::tests::UNTOUCHED);
        assert_eq!(cpu.exit(exit_code::NPF), Next::Run);
        assert_eq!((&cpu.hardware.mappings, cpu.hardware.mapped), (&mappings, false));
    }
    // An exit that needs no memory has none mapped.
    cpu.area.control.cpl = 3;
    assert_eq!(cpu.exit(exit_code::VMMCALL), Next::Run);
    assert_eq!(cpu.hardware.mappings.len(), 2);
}

/// While the kernel changes its own code the CPU runs without read-only pages, until it loads another CR3.
#[test]
fn a_change_of_code_ends_with_the_next_page_tables() {
    for (on_snapshot, root) in [(0, crate::nested::root().as_u64()), (live::ON_SNAPSHOT, 0x7000)] {
        let mut cpu = Attached::new();
        let rip = cpu.area.control.rip;
        cpu.area.cpu.on_snapshot = on_snapshot;
        cpu.area.control.nested_cr3 = 0x7000;
        cpu.area.control.intercept_cr_dr_exceptions[0] = INTERCEPT_CR3_WRITE;
        assert_eq!(cpu.exit(exit_code::CR3_WRITE), Next::Run);
        let control = &cpu.area.control;
        assert_eq!((control.intercept_cr_dr_exceptions[0], control.nested_cr3), (0, root));
        assert_eq!((control.rip, control.tlb_control), (rip, TLB_FLUSH_ALL), "the write is made then");
        assert_eq!(count(&mut cpu, ExitReason::TextPoke), 1);
    }
}

/// The driver's calls come from a kernel that may have trained nothing, but user mode before it may.
#[test]
fn the_drivers_calls_forget_predictions_before_memory_is_mapped() {
    crate::nested::tests::install::<super::Svm>();
    let mut cpu = Attached::new();
    let _ = snapshot_call(&mut cpu, SnapshotCall::Tables, WIDE);
    cpu.area.cpu.barriers = speculation::IBPB;
    let mut status = SnapshotStatus::default();
    let argument = (&raw mut status).expose_provenance() as u64;
    assert_eq!(snapshot_call(&mut cpu, SnapshotCall::Status, argument), Next::Run);
    assert_eq!((cpu.hardware.mappings, cpu.hardware.mapped), (vec![Some(speculation::IBPB)], false));
}

/// An event that cannot be delivered, and that nothing raises again, is logged. The gate raises a machine
/// check.
#[test]
fn an_event_that_cannot_be_delivered_does_not_keep_a_cpu() {
    crate::nested::tests::install::<super::Svm>();
    let page_fault = event::VALID | event::EXCEPTION | event::HAS_ERROR_CODE | 14;
    let is_told = [
        (event::VALID | 0xEC, true),
        (event::DEBUG, true),
        (page_fault, false),
        (event::MACHINE_CHECK, false),
    ];
    for (first, is_told) in is_told {
        let mut cpu = Attached::new();
        cpu.area.control.exit_event = first;
        assert_eq!(cpu.exit(0x402), Next::Run);
        assert_eq!(cpu.enter(), first);
        (cpu.area.control.exit_event, cpu.area.control.exit_info1) = (first, 6);
        cpu.area.control.exit_info2 = crate::nested::tests::BEYOND;
        assert_eq!(cpu.exit(exit_code::NPF), Next::Leave);
        let raised = cpu.area.cpu.gate.machine_check != 0;
        let lost = cpu.area.shared().log.iter().find(|record| record.kind == LogKind::EventLost as u32);
        let told = lost.map(|record| (record.arguments[0], record.arguments[1]));
        assert_eq!(told, is_told.then_some((first, exit_code::NPF)));
        assert_eq!(raised, first == event::MACHINE_CHECK);
    }
}

/// A pending departure does not depend on the guest's next exit, for there may be none.
#[test]
fn a_departure_waits_no_longer_than_for_interrupts() {
    for machine_check in [false, true] {
        let mut cpu = Attached::new();
        cpu.area.control.exit_event = event::VALID | 0xEC;
        if machine_check {
            cpu.area.cpu.phase = Phase::Exit;
            machine_check::note(&mut cpu.area, &mut cpu.hardware, true);
        }
        assert_eq!(cpu.exit(0x402), Next::Run);
        assert_eq!(cpu.area.control.virtual_interrupt, VIRTUAL_INTERRUPT);
        assert_eq!(cpu.area.control.intercept_misc1, INTERCEPT_MISC1 | INTERCEPT_VINTR);
        cpu.enter();
        assert_eq!(cpu.exit(exit_code::VINTR), Next::Leave);
        assert_eq!(cpu.area.cpu.gate.machine_check != 0, machine_check);
    }
}

/// A machine check that takes the place of the event does not make the CPU forget its departure.
#[test]
fn a_departure_waits_behind_a_machine_check_too() {
    const LASS: u64 = 1 << 27;
    let mut cpu = Attached::new();
    cpu.area.control.cr4 |= LASS;
    cpu.area.cpu.phase = Phase::Exit;
    machine_check::note(&mut cpu.area, &mut cpu.hardware, true);
    assert_eq!(cpu.exit(exit_code::VMRUN), Next::Run, "the fault has no native counterpart");
    assert_eq!(cpu.enter(), event::MACHINE_CHECK);
    assert_eq!(cpu.area.control.intercept_misc1, INTERCEPT_MISC1 | INTERCEPT_VINTR);
    assert_eq!(cpu.exit(exit_code::VINTR), Next::Leave);
    assert_eq!((cpu.area.cpu.gate.machine_check, cpu.area.cpu.gate.outward.cr4), (0, 0x6F0 | LASS));
}

#[test]
fn an_event_that_a_failure_left_behind_is_delivered_before_the_cpu_leaves() {
    let mut cpu = Attached::new();
    let timer = event::VALID | 0xEC;
    cpu.area.control.exit_event = timer;
    let next = super::exits::depart(&mut cpu.area, &mut cpu.hardware, Code::HostException);
    assert_eq!(next, Next::Run);
    assert_eq!(cpu.area.control.inject_event, timer);
}

#[test]
fn a_crash_is_logged_with_its_cause_and_both_instructions() {
    let mut cpu = Attached::new();
    let rip = cpu.area.control.rip;
    cpu.exit(0x402);
    let record = cpu.area.shared().log[0];
    assert_eq!(record.kind, LogKind::Crash as u32);
    assert_eq!(record.arguments, [u64::from(Code::UnknownExit as u32), 0x402, 0, rip, 0]);
}

#[test]
fn a_control_block_refused_at_attach_is_rolled_back_with_the_reason() {
    let mut cpu = Attached::new();
    cpu.area.cpu.entered = 0;
    cpu.area.control.asid = 0;
    cpu.area.cpu.gate.inward.rip = 0xFFFF_FFFF_C000_0000;
    cpu.area.cpu.gate.inward.cr4 = 0x6F0;
    assert_eq!(cpu.exit(exit_code::INVALID), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.rip, 0xFFFF_FFFF_C000_0000);
    assert_eq!(cpu.area.cpu.gate.outward.registers[0], Code::InvalidGuestState as u64);
    assert_eq!(cpu.area.cpu.gate.detail, [super::refusal::Check::AsidZero as u64, 0]);
    assert_eq!(cpu.area.control.asid, 0, "the block is empty again");
    assert_eq!(cpu.area.control.intercept_misc2, 0);
}

#[test]
fn a_control_block_refused_later_lets_the_machine_run_on() {
    let mut cpu = Attached::new();
    cpu.area.control.efer = 0;
    assert_eq!(cpu.exit(exit_code::INVALID), Next::Leave);
    assert_eq!(cpu.hardware.msrs[&msr::EFER], LINUX_EFER | msr::EFER_SVME, "EFER is known from elsewhere");
    assert_eq!(cpu.area.shared().crash.code, Code::InvalidGuestState as u32);
}

#[test]
fn a_block_that_the_refusal_damaged_is_restored_and_recorded_as_it_was() {
    let mut cpu = Attached::new();
    let rip = cpu.area.control.rip;
    assert_eq!(hypercall(&mut cpu, Hypercall::Ping as u64), Next::Run);
    (cpu.area.control.rip, cpu.area.control.rsp, cpu.area.control.asid) = (0xBAD, 0xBAD, 0);
    assert_eq!(cpu.exit(exit_code::INVALID), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.rip, rip + 3);
    assert_eq!(cpu.area.cpu.gate.outward.registers[4], 0xFFFF_C900_0000_3F00);
    assert_eq!(cpu.area.shared().crash.guest_rip, rip + 3);
}

proptest! {
    /// Any event is handed over unchanged, or repaired, or left to its instruction. An injected event is
    /// always legal (APM vol. 2, 15.20).
    #[test]
    fn events_handed_over_are_legal(kind in 0u64..8, vector in 0u64..256, code in any::<u32>()) {
        let mut cpu = Attached::new();
        let legal = matches!((kind, vector), (0, _) | (2, 2) | (3, 0..=31) | (4, _)) || kind == 3;
        prop_assume!(legal);
        cpu.area.control.exit_event = event::VALID | kind << 8 | vector | u64::from(code) << 32;
        prop_assert_eq!(hypercall(&mut cpu, Hypercall::Ping as u64), Next::Run);
        let injected = cpu.area.control.inject_event;
        if injected & event::VALID != 0 {
            prop_assert_ne!(super::refusal::first(&cpu.area.control), super::refusal::Check::IllegalEvent);
            prop_assert_eq!(injected & 0xFF, vector);
        } else {
            prop_assert!(kind == 4 || kind == 3 && (vector == 3 || vector == 4));
        }
    }

    /// No exit code, qualification or register makes the handler panic, and each either resumes or leaves
    /// with the interrupted instruction pointer.
    #[test]
    fn any_exit_is_answered(
        code in any::<u16>(),
        info1 in any::<u64>(),
        rax in any::<u64>(),
        rcx in any::<u64>(),
    ) {
        prop_assume!(u64::from(code) != exit_code::NPF);
        let mut cpu = Attached::new();
        let rip = cpu.area.control.rip;
        *cpu.register(0) = rax;
        *cpu.register(RCX) = rcx;
        cpu.area.control.exit_info1 = info1;
        if cpu.exit(u64::from(code)) == Next::Leave {
            prop_assert!([rip, rip + 3].contains(&cpu.area.cpu.gate.outward.rip));
        }
    }
}

/// The first entry of an attachment starts afresh, with any remains of an earlier one in the block.
#[test]
fn every_attach_starts_afresh() {
    let mut cpu = Attached::new();
    cpu.area.cpu.features = super::capture::feature::VIRTUAL_SPEC_CTRL;
    cpu.area.cpu.control_phys = 0x20_1000;
    cpu.hardware.msrs.insert(msr::SPEC_CTRL, 5);
    let control = &mut cpu.area.control;
    (control.clean, control.tlb_control, control.asid) = (u64::MAX, 0, 7);
    (control.exit_event, control.inject_event, control.interrupt_shadow) = (event::DEBUG, event::DEBUG, 1);
    let roots = super::capture::Roots { nested: HostPhys::new(0x5000), msrpm: HostPhys::new(0x6000) };
    assert_eq!(super::capture::fill(&mut cpu.area, &mut cpu.hardware, roots), Ok(()));
    assert!(super::capture::is_fresh(&cpu.area));
    assert_eq!((cpu.area.control.spec_ctrl, cpu.hardware.msrs[&msr::SPEC_CTRL]), (5, 0));
    assert_eq!(cpu.area.control.g_pat, LINUX_PAT);
    assert_eq!(cpu.hardware.msrs[&msr::VM_HSAVE_PA], cpu.area.processor_page_phys());
}

/// SPEC_CTRL is returned once: values that the kernel writes later are the kernel's (HARDWARE A-16).
#[test]
fn speculation_control_is_returned_once() {
    let mut cpu = Attached::new();
    cpu.area.own.around_guest = guests::LENT;
    cpu.area.control.spec_ctrl = 5;
    cpu.hardware.msrs.insert(msr::SPEC_CTRL, 0);
    assert_eq!(hypercall(&mut cpu, Hypercall::Detach as u64), Next::Leave);
    assert_eq!(cpu.hardware.msrs[&msr::SPEC_CTRL], 5);
    cpu.hardware.msrs.insert(msr::SPEC_CTRL, 3);
    cpu.area.cpu.gate.inward.cr4 = 0x6F0;
    cpu.area.control.nested_control = 1;
    super::capture::put_back_native(&mut cpu.area, &mut cpu.hardware, Code::Ok);
    assert_eq!(cpu.hardware.msrs[&msr::SPEC_CTRL], 3, "the next preflight must leave it alone");
}

/// Reserved bits, fetches and reads of what is mapped have no cure in the tables: the CPU leaves instead of
/// faulting for ever.
#[test]
fn a_nested_fault_that_nothing_explains_lets_go() {
    for info in [0x1, 0x5, 0x9, 0xB, 0x11] {
        let mut cpu = Attached::new();
        cpu.area.control.exit_info1 = info;
        assert_eq!(cpu.exit(exit_code::NPF), Next::Leave, "{info:#x}");
        assert_eq!(cpu.area.shared().left_because, u64::from(Code::UnknownExit as u32));
    }
}

/// A user's shadow stack pointer lies in the control block; IRET will load it from PL3_SSP.
#[test]
fn user_mode_that_leaves_takes_its_shadow_stack_along() {
    const SSP: u64 = 0x7FFF_F7A0_1FF8;
    for (cpl, user, expected) in [(3, 1, SSP), (3, 0, 7), (0, 1, 7)] {
        let mut cpu = Attached::new();
        cpu.area.cpu.features = super::capture::feature::SUPERVISOR_SHADOW_STACK;
        (cpu.area.control.cpl, cpu.area.control.ssp) = (cpl, SSP);
        cpu.area.control.cr4 |= 1 << 23;
        cpu.hardware.msrs.extend([
            (msr::U_CET, user),
            (msr::PL3_SSP, 7),
            (msr::S_CET, 0),
            (msr::ISST_ADDR, 0),
        ]);
        assert_eq!(cpu.exit(0x402), Next::Leave);
        assert_eq!(cpu.hardware.msrs[&msr::PL3_SSP], expected, "CPL {cpl}, U_CET {user}");
    }
}

/// A machine check of the hypervisor goes before a fault, which its instruction raises again.
#[test]
fn a_machine_check_in_an_exit_is_delivered_before_a_fault() {
    let mut cpu = Attached::new();
    let rip = cpu.area.control.rip;
    cpu.area.cpu.phase = Phase::Exit;
    machine_check::note(&mut cpu.area, &mut cpu.hardware, true);
    assert_eq!(cpu.exit(exit_code::VMRUN), Next::Run);
    assert_eq!((cpu.enter(), cpu.area.control.rip), (event::MACHINE_CHECK, rip));
    assert_eq!(cpu.exit(exit_code::VMRUN), Next::Run);
    assert_eq!(cpu.enter(), event::INVALID_OPCODE, "delivered once");
    assert_eq!(cpu.area.cpu.gate.machine_check, 0);
}

/// A machine check goes after an event that nothing raises again, at the next moment that the processor
/// reports.
#[test]
fn a_machine_check_waits_for_an_event_and_no_longer() {
    let mut cpu = Attached::new();
    let timer = event::VALID | 0xEC;
    for first in [timer, event::DEBUG, event::VALID | event::NMI | 2] {
        cpu.area.control.exit_event = first;
        cpu.area.cpu.phase = Phase::Exit;
        machine_check::note(&mut cpu.area, &mut cpu.hardware, true);
        assert_eq!(hypercall(&mut cpu, Hypercall::Ping as u64), Next::Run);
        assert_eq!(cpu.enter(), first);
        assert_eq!(cpu.area.control.virtual_interrupt, VIRTUAL_INTERRUPT);
        assert_eq!(cpu.exit(exit_code::VINTR), Next::Run);
        assert_eq!(cpu.enter(), event::MACHINE_CHECK);
        assert_eq!(cpu.area.control.virtual_interrupt, 0);
        assert_eq!(cpu.area.control.intercept_misc1, INTERCEPT_MISC1);
    }
}

/// On the way to VMRUN no code reads the note any more: the handler hands the machine check over itself.
#[test]
fn a_machine_check_on_the_way_to_the_guest_is_injected_at_once() {
    let mut cpu = Attached::new();
    assert_eq!(hypercall(&mut cpu, Hypercall::Ping as u64), Next::Run);
    machine_check::note(&mut cpu.area, &mut cpu.hardware, true);
    assert_eq!(cpu.area.control.inject_event, event::MACHINE_CHECK);
    // In the quick answer, which then finds that the exit is of another kind.
    assert_eq!(hypercall(&mut cpu, Hypercall::Ping as u64), Next::Run);
    assert_eq!(cpu.enter(), event::MACHINE_CHECK, "nothing has entered the guest yet");
    assert_eq!(cpu.exit(exit_code::VMRUN), Next::Run);
    assert_eq!(cpu.enter(), event::INVALID_OPCODE);
}

/// The gate raises a machine check that the guest has not got, on each way of leaving.
#[test]
fn a_machine_check_outlives_every_departure() {
    let leave: [fn(&mut Attached) -> Next; 4] = [
        |cpu| hypercall(cpu, Hypercall::Detach as u64),
        |cpu| cpu.exit(0x402),
        |cpu| {
            machine_check::finish(&mut cpu.area, &mut cpu.hardware, Next::Run);
            cpu.exit(exit_code::INVALID)
        },
        |cpu| {
            cpu.area.cpu.gate.inward.cr4 = 0x6F0;
            super::capture::put_back_native(&mut cpu.area, &mut cpu.hardware, Code::Ok);
            machine_check::finish(&mut cpu.area, &mut cpu.hardware, Next::Leave)
        },
    ];
    for (number, leave) in leave.iter().enumerate() {
        let mut cpu = Attached::new();
        cpu.area.cpu.phase = Phase::Exit;
        machine_check::note(&mut cpu.area, &mut cpu.hardware, false);
        assert_eq!(leave(&mut cpu), Next::Leave, "{number}");
        assert_ne!(cpu.area.cpu.gate.machine_check, 0, "{number}");
    }
}

/// A machine check during an attach is the guest's first event.
#[test]
fn a_machine_check_during_an_attach_is_delivered_to_the_guest() {
    let mut cpu = Attached::new();
    cpu.area.cpu.control_phys = 0x20_1000;
    cpu.area.cpu.phase = Phase::Native;
    machine_check::note(&mut cpu.area, &mut cpu.hardware, true);
    let roots = super::capture::Roots { nested: HostPhys::new(0x5000), msrpm: HostPhys::new(0x6000) };
    assert_eq!(super::capture::fill(&mut cpu.area, &mut cpu.hardware, roots), Ok(()));
    machine_check::finish(&mut cpu.area, &mut cpu.hardware, Next::Run);
    assert_eq!(cpu.enter(), event::MACHINE_CHECK);
}

/// This processor decides which bits of EFER exist, and no list of all bits that ever did.
#[test]
fn efer_writes_are_judged_by_this_processor() {
    let attached = LINUX_EFER | msr::EFER_SVME;
    let mut cpu = Attached::new();
    assert_eq!(write_msr(&mut cpu, msr::EFER, attached | efer::AUTOIBRS), Next::Run);
    assert_eq!(cpu.enter(), 0);
    assert_eq!(cpu.area.control.efer, attached | efer::AUTOIBRS);
    assert_eq!(cpu.hardware.msrs[&msr::EFER], attached, "the hypervisor's stays");

    let mut cpu = Attached::new();
    cpu.hardware.efer_absent = efer::AUTOIBRS;
    assert_eq!(write_msr(&mut cpu, msr::EFER, attached | efer::AUTOIBRS), Next::Run);
    assert_eq!(cpu.enter(), event::GENERAL_PROTECTION);
    assert_eq!(cpu.area.control.efer, attached);

    let mut cpu = Attached::new();
    cpu.hardware.efer_ignored = efer::AUTOIBRS;
    assert_eq!(write_msr(&mut cpu, msr::EFER, attached | efer::AUTOIBRS), Next::Run);
    assert_eq!((cpu.enter(), cpu.area.control.efer), (0, attached));
}

/// While a value is tried and while a CPU leaves, the hypervisor's tables are in use, and they have NX bits:
/// a guest that wants NXE clear clears it natively.
#[test]
fn the_hypervisors_efer_keeps_what_it_needs() {
    let attached = LINUX_EFER | msr::EFER_SVME;
    let mut cpu = Attached::new();
    cpu.hardware.efer_must = efer::REQUIRED | msr::EFER_SVME;
    assert_eq!(write_msr(&mut cpu, msr::EFER, attached & !efer::SCE), Next::Run);
    assert_eq!(cpu.area.control.efer, attached & !efer::SCE);
    assert_eq!(cpu.hardware.msrs[&msr::EFER], attached, "the hypervisor's stays");

    let rip = cpu.area.control.rip;
    assert_eq!(write_msr(&mut cpu, msr::EFER, attached & !efer::NXE), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.rip, rip);
    assert_eq!(cpu.hardware.msrs[&msr::EFER], attached & !efer::SCE, "as the guest had it before");
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::EferUnsupported as u32));
    assert_eq!(cpu.area.shared().crash.code, 0);
}

/// The native processor takes or refuses a bit that Mercury does not carry. The hypervisor does not fail on
/// it.
#[test]
fn efer_bits_that_are_not_carried_let_go() {
    for bit in [13, 17, 20] {
        let mut cpu = Attached::new();
        let (rip, value) = (cpu.area.control.rip, LINUX_EFER | msr::EFER_SVME | 1 << bit);
        assert_eq!(write_msr(&mut cpu, msr::EFER, value), Next::Leave);
        assert_eq!(cpu.area.cpu.gate.outward.rip, rip);
        assert_eq!(cpu.area.shared().left_because, u64::from(Code::EferUnsupported as u32));
        assert_eq!(cpu.area.shared().crash.code, 0);
    }
}

/// A bit of CR4 that a later kernel sets: the processor took it, so the CPU leaves with it and without a
/// record, after the instruction that was answered.
#[test]
fn foreign_bits_of_cr4_let_go_without_a_crash() {
    const LASS: u64 = 1 << 27;
    let mut cpu = Attached::new();
    cpu.area.control.cr4 |= LASS;
    let rip = cpu.area.control.rip;
    assert_eq!(write_msr(&mut cpu, msr::EFER, LINUX_EFER | msr::EFER_SVME), Next::Leave);
    assert_eq!((cpu.area.cpu.gate.outward.rip, cpu.area.cpu.gate.outward.cr4), (rip + 2, 0x6F0 | LASS));
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::Cr4Unsupported as u32));
    assert_eq!(cpu.area.shared().crash.code, 0);

    let mut cpu = Attached::new();
    cpu.area.control.cr4 |= LASS;
    assert_eq!(cpu.exit(exit_code::VMRUN), Next::Run, "the fault has no native counterpart");
    assert_eq!(cpu.enter(), event::INVALID_OPCODE);
    assert_eq!(cpu.exit(exit_code::VMRUN), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.cr4, 0x6F0 | LASS);
}

#[test]
fn foreign_bits_of_cr4_survive_a_detach() {
    const LASS: u64 = 1 << 27;
    let mut cpu = Attached::new();
    cpu.area.control.cr4 |= LASS;
    assert_eq!(hypercall(&mut cpu, Hypercall::Detach as u64), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.cr4, 0x6F0 | LASS);
}

/// If VMRUN refused a block, none of its bits can be trusted: the gate gets no bit that may fault there.
#[test]
fn a_corrupt_cr4_is_not_carried_out() {
    let mut cpu = Attached::new();
    (cpu.area.control.cr4, cpu.area.control.asid) = (0x6F0 | 1 << 63, 0);
    assert_eq!(cpu.exit(exit_code::INVALID), Next::Leave);
    assert_eq!(cpu.area.cpu.gate.outward.cr4, 0x6F0);
    assert_ne!(cpu.area.shared().crash.code, 0);
}

/// An INIT leaves no record. The next native operation publishes that the CPU is not attached any more.
#[test]
fn a_cpu_that_was_reset_is_not_taken_for_attached() {
    let mut cpu = Attached::new();
    crate::publish::attached(&mut cpu.area);
    crate::publish::native(&mut cpu.area, Code::CpuReset);
    assert_eq!((cpu.area.shared().attached, cpu.area.shared().detaches), (0, 1));
    assert_eq!(cpu.area.shared().left_because, u64::from(Code::CpuReset as u32));
    crate::publish::native(&mut cpu.area, Code::CpuReset);
    assert_eq!(cpu.area.shared().detaches, 1);
}

/// The quick answer does not check for machine checks at its end, so it does not begin with one. The gate
/// raises one that strikes meanwhile.
#[test]
fn a_machine_check_is_no_case_for_the_short_way() {
    let quick = |cpu: &mut Attached, call: Hypercall| {
        *cpu.register(0) = call as u64;
        *cpu.register(RCX) = HYPERCALL_MAGIC;
        cpu.area.control.exit_code = exit_code::VMMCALL;
        super::quick::answer(&mut cpu.area, &mut cpu.hardware)
    };
    let mut cpu = Attached::new();
    assert_eq!(quick(&mut cpu, Hypercall::Ping), Quick::Run);
    machine_check::note(&mut cpu.area, &mut cpu.hardware, true);
    assert_eq!(quick(&mut cpu, Hypercall::Ping), Quick::Slow);

    let mut cpu = Attached::new();
    assert_eq!(quick(&mut cpu, Hypercall::Detach), Quick::Leave);
    machine_check::note(&mut cpu.area, &mut cpu.hardware, true);
    assert_ne!(cpu.area.cpu.gate.machine_check, 0);
}
