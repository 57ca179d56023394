//! Fetches a CPU for a rollback, and puts it back.
//!
//! While a snapshot is the target of a rollback, NMIs exit, and the processor tracks for the guest if NMIs
//! are blocked ("virtual NMIs"). So an NMI that fetches the CPU exits even in a handler of NMIs. One that is
//! the system's own is injected: at once, or as soon as the guest can take it (SDM volume 3, "Pin-based
//! VM-execution controls", and "NMI-window exiting" among other causes of exits).
//!
//! An NMI that strikes in the hypervisor is only noted there. The way into the guest finds the note and turns
//! back ([`super::run`]). Then the NMI is answered like one that exits.

use mercury_abi::code::Code;
use mercury_abi::gate::{Inward, Segment};
use mercury_abi::restart::SavedCpu;
use mercury_abi::shared::ExitReason;
use mercury_abi::snapshot::{MERCURY_ROLLED_BACK, RollbackReason};
use mercury_preflight::bits::cr4;
use mercury_preflight::vmx::{entry, pin, primary};

use super::capture::{self, CR0_NE};
use super::exits::{is_event_pending, note_nmi};
use super::vmcs::{self, activity, blocking, event};
use super::{Area, Own};
use crate::address::HostPhys;
use crate::exit::Answer;
use crate::snapshot::rollback::{self, Watch};
use crate::x86::{DR7_CLEAR, Hardware, msr};
use crate::{machine_check, nested, publish};

pub(super) fn watch(area: &mut Area, hardware: &mut impl Hardware, watch: Watch) {
    let mut controls = area.own.controls.pin;
    unwatch(area);
    if watch == Watch::On {
        controls |= pin::NMI_EXITING | pin::VIRTUAL_NMIS;
        area.own.watched = 1;
    }
    hardware.vmwrite(vmcs::PIN_CONTROLS, u64::from(controls));
}

/// Returns an NMI that waits to the note, for a CPU that leaves or whose NMIs exit no longer.
pub(super) fn unwatch(area: &mut Area) {
    area.own.watched = 0;
    if core::mem::take(&mut area.own.nmi_waits) != 0 {
        note_nmi(area);
    }
}

/// Answers an NMI. It fetches this CPU for a rollback, or is the system's, which [`give_nmi`] gives it. While
/// one waits the processor would hold back one as well.
pub(super) fn nmi(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    publish::count(area, ExitReason::Other);
    if rollback::wants(area) && rollback::join(area, hardware).is_ok() {
        return Answer::RetryFlushed;
    }
    area.own.nmi_waits = 1;
    Answer::Retry
}

/// Answers an NMI that has turned the CPU back on its way into the guest. The exit before is answered
/// already.
#[cold]
pub(super) fn turned_back(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    area.own.turned_back = 0;
    area.own.exit.event = 0;
    // NMIs are blocked from the note to the entry.
    area.cpu.gate.nmi.pending = 0;
    nmi(area, hardware)
}

/// Injects an NMI that waits, if the guest can take it (SDM, "Checks on guest non-register state"). Returns
/// the primary controls that bring the guest back when it can: it returns from its handler of NMIs, or it has
/// gone one step or received another event. A single step that has yet to be reported goes first, for the NMI
/// would replace it.
pub(super) fn give_nmi(area: &mut Area, hardware: &mut impl Hardware) -> u32 {
    let blocked = hardware.vmread(vmcs::GUEST_INTERRUPTIBILITY);
    if blocked & blocking::NMI != 0 {
        return primary::NMI_WINDOW_EXITING;
    }
    if hardware.vmread(vmcs::GUEST_ACTIVITY) > activity::HALTED {
        return 0;
    }
    let is_shadowed = blocked & (blocking::STI | blocking::MOV_SS) != 0;
    if is_shadowed || is_event_pending(hardware) || hardware.vmread(vmcs::GUEST_PENDING_DEBUG) != 0 {
        return primary::MONITOR_TRAP_FLAG;
    }
    hardware.vmwrite(vmcs::ENTRY_INTERRUPTION, event::INJECT_NMI);
    area.own.nmi_waits = 0;
    0
}

/// Asks for a rollback after a triple fault: the system cannot go on.
///
/// # Errors
/// As for [`rollback::ask`]: the machine ends as it would natively.
pub(super) fn triple_fault(area: &mut Area, hardware: &mut impl Hardware) -> Result<(), Code> {
    if area.cpu.on_snapshot == 0 {
        return Err(Code::NoSnapshot);
    }
    // Not 0, which stands for none.
    let signature = area.cpu.interrupted.rip | 1;
    rollback::ask(area, hardware, RollbackReason::TripleFault, signature)
}

/// Puts the registers back that the kernel had at the instant of the snapshot, on the snapshot's tables. MSRs
/// that exits load are those of the attach. The kernel itself restores MSRs that only it writes.
pub(super) fn put_back(area: &mut Area, hardware: &mut impl Hardware, saved: &SavedCpu, root: HostPhys) {
    put_registers(&area.own, hardware, saved);
    put_segments(&area.cpu.gate.inward, hardware, saved);
    hardware.vmwrite(vmcs::EPT_POINTER, capture::ept_pointer(root, nested::depth()));
    // Neither entries nor exits load it.
    let _ = hardware.write_msr(msr::KERNEL_GS_BASE, saved.kernel_gs_base);
    let [rbx, rbp, r12, r13, r14, r15] = saved.registers;
    area.cpu.gate.outward.registers =
        [MERCURY_ROLLED_BACK, 0, 0, rbx, 0, rbp, 0, 0, 0, 0, 0, 0, r12, r13, r14, r15];
    let own = &mut area.own;
    (own.foreign, own.refused_to_leave, own.awaits_window, own.nmi_waits) = (0, 0, 0, 0);
    own.exit.event = 0;
    area.cpu.gate.nmi.pending = 0;
    watch(area, hardware, Watch::On);
    machine_check::forget(area);
    machine_check::end(hardware);
}

fn put_registers(own: &Own, hardware: &mut impl Hardware, saved: &SavedCpu) {
    let cr4 = saved.cr4 | cr4::VMXE;
    let [_, _, sysenter @ ..] = own.captured;
    for (field, value) in [
        (vmcs::ENTRY_CONTROLS, u64::from(own.controls.entry)),
        (vmcs::ENTRY_INTERRUPTION, 0),
        (vmcs::CR0_MASK, CR0_NE),
        (vmcs::CR0_SHADOW, saved.cr0),
        (vmcs::GUEST_CR0, saved.cr0 | CR0_NE),
        (vmcs::CR4_SHADOW, cr4),
        (vmcs::GUEST_CR4, cr4),
        (vmcs::GUEST_CR3, saved.cr3),
        (vmcs::GUEST_DR7, DR7_CLEAR),
        (vmcs::GUEST_RIP, saved.rip),
        (vmcs::GUEST_RSP, saved.rsp),
        (vmcs::GUEST_RFLAGS, saved.rflags),
        (vmcs::GUEST_SYSENTER_CS, sysenter[0]),
        (vmcs::GUEST_SYSENTER_ESP, sysenter[1]),
        (vmcs::GUEST_SYSENTER_EIP, sysenter[2]),
        (vmcs::GUEST_DEBUGCTL, 0),
        (vmcs::GUEST_PAT, own.host_pat),
        (vmcs::GUEST_EFER, own.host_efer),
        (vmcs::GUEST_ACTIVITY, activity::ACTIVE),
        (vmcs::GUEST_INTERRUPTIBILITY, 0),
        (vmcs::GUEST_PENDING_DEBUG, 0),
        (vmcs::GUEST_GDTR_BASE, saved.gdtr.base_virt),
        (vmcs::GUEST_GDTR_LIMIT, u64::from(saved.gdtr.limit)),
        (vmcs::GUEST_IDTR_BASE, saved.idtr.base_virt),
        (vmcs::GUEST_IDTR_LIMIT, u64::from(saved.idtr.limit)),
    ] {
        hardware.vmwrite(field, value);
    }
    if own.controls.entry & entry::LOAD_CET != 0 {
        hardware.vmwrite(vmcs::GUEST_S_CET, own.captured_cet[0]);
        hardware.vmwrite(vmcs::GUEST_SSP, 0);
        hardware.vmwrite(vmcs::GUEST_INTERRUPT_SSP_TABLE, own.captured_cet[1]);
    }
}

/// Puts the segments back. Code, stack and task segment are those of the attach: an NMI may come before the
/// kernel has set its task register again, and finds its stack by it.
fn put_segments(inward: &Inward, hardware: &mut impl Hardware, saved: &SavedCpu) {
    let [ds, es] = saved.data_selectors.map(data_segment);
    let none = Segment::default();
    for (number, segment, base) in [
        (0, &es, 0),
        (1, &inward.cs, inward.cs.base),
        (2, &inward.ss, inward.ss.base),
        (3, &ds, 0),
        (4, &none, saved.fs_base),
        (5, &none, saved.gs_base),
        (6, &none, 0),
        (7, &inward.tr, inward.tr_base_virt),
    ] {
        put_segment(hardware, number, segment, base);
    }
}

/// As [`capture::put_segment`], which an attach inlines for speed.
#[inline(never)]
fn put_segment(hardware: &mut impl Hardware, number: u32, segment: &Segment, base: u64) {
    capture::put_segment(hardware, number, segment, base);
}

/// Returns a data segment of 64-bit mode, by its selector.
fn data_segment(selector: u64) -> Segment {
    let selector = selector as u16;
    match rollback::data_rights(selector) {
        Some(attributes) => Segment { selector, attributes, limit: u32::MAX, base: 0 },
        None => Segment { selector, ..Segment::default() },
    }
}

#[cfg(test)]
mod tests {
    use mercury_abi::gate::DescriptorTable;
    use mercury_preflight::example::good_xeon;
    use mercury_preflight::vmx::can_roll_back;

    use super::*;
    use crate::host::entry::Next;
    use crate::paging::table::Depth;
    use crate::vendor::Vendor;
    use crate::vmx::Vmx;
    use crate::vmx::tests::{CR4, Cpu, RIP, TSS, write_control};
    use crate::vmx::vmcs::reason;

    const ROOT: HostPhys = HostPhys::new(0x77_7000);
    const ON: u32 = pin::NMI_EXITING | pin::VIRTUAL_NMIS;
    const STEP: u32 = primary::MONITOR_TRAP_FLAG;
    const WINDOW: u32 = primary::NMI_WINDOW_EXITING;

    fn watched() -> Cpu {
        let mut cpu = Cpu::attached();
        cpu.area.cpu.on_snapshot = 1;
        watch(&mut cpu.area, &mut cpu.hardware, Watch::On);
        assert_eq!(pins(&cpu), ON);
        cpu
    }

    fn pins(cpu: &Cpu) -> u32 {
        cpu.get(vmcs::PIN_CONTROLS) as u32 & ON
    }

    /// Returns the controls that bring the guest back for an NMI.
    fn asked(cpu: &Cpu) -> u32 {
        cpu.get(vmcs::PRIMARY_CONTROLS) as u32 & (STEP | WINDOW)
    }

    /// Has an NMI strike in the hypervisor, whose way into the guest turns back.
    fn turn_back(cpu: &mut Cpu) -> Next {
        cpu.area.cpu.gate.nmi.pending = 1;
        cpu.area.own.turned_back = 1;
        crate::vmx::exits::begin(&mut cpu.area, &mut cpu.hardware);
        let next = crate::vmx::exits::handle(&mut cpu.area, &mut cpu.hardware);
        assert_eq!((cpu.area.cpu.gate.nmi.pending, cpu.area.own.turned_back), (0, 0));
        next
    }

    #[test]
    fn a_processor_without_the_controls_keeps_no_snapshot() {
        assert!(Vmx::rolls_back(&Cpu::attached().area));
        let may = |bits: u32| u64::from(bits) << 32;
        let lacks = |pin: u32, primary: u32| {
            let mut facts = good_xeon(0);
            facts.vmx_pin_controls &= !may(pin);
            facts.vmx_primary_controls &= !may(primary);
            !can_roll_back(&facts) && capture::features(&facts) & capture::feature::ROLLBACK == 0
        };
        assert!(lacks(pin::NMI_EXITING, 0) && lacks(pin::VIRTUAL_NMIS, 0));
        assert!(lacks(0, WINDOW) && lacks(0, STEP) && !lacks(0, 0));
    }

    /// The processor's note would make the next machine check a shutdown.
    #[test]
    fn a_machine_check_is_over() {
        let mut cpu = watched();
        cpu.hardware.msrs.insert(msr::MCG_STATUS, 0b111);
        put_back(&mut cpu.area, &mut cpu.hardware, &SavedCpu::default(), ROOT);
        assert_eq!(cpu.hardware.msrs[&msr::MCG_STATUS], 0);
    }

    #[test]
    fn an_nmi_of_the_systems_is_injected() {
        let mut cpu = watched();
        assert_eq!(cpu.exit(reason::NMI), Next::Run);
        assert_eq!((cpu.injected(), asked(&cpu)), (event::INJECT_NMI, 0));
        assert_eq!(cpu.get(vmcs::GUEST_RIP), RIP, "nothing is skipped");
        // The next exit finds none.
        assert_eq!(cpu.exit(reason::CPUID), Next::Run);
        assert_eq!((cpu.injected() & event::VALID, asked(&cpu)), (0, 0));
    }

    /// The processor holds one NMI back, and so does the hypervisor.
    #[test]
    fn an_nmi_waits_for_the_end_of_the_handler() {
        let mut cpu = watched();
        cpu.set(vmcs::GUEST_INTERRUPTIBILITY, blocking::NMI);
        for _ in 0..2 {
            assert_eq!(cpu.exit(reason::NMI), Next::Run);
            assert_eq!((cpu.injected() & event::VALID, asked(&cpu)), (0, WINDOW));
        }
        // Another exit of the handler's does not lose it.
        assert_eq!(cpu.exit(reason::CPUID), Next::Run);
        assert_eq!((cpu.injected() & event::VALID, asked(&cpu)), (0, WINDOW));
        cpu.set(vmcs::GUEST_INTERRUPTIBILITY, 0);
        assert_eq!(cpu.exit(reason::NMI_WINDOW), Next::Run);
        assert_eq!((cpu.injected(), asked(&cpu)), (event::INJECT_NMI, 0));
        assert_eq!(cpu.exit(reason::MONITOR_TRAP), Next::Run);
        assert_eq!((cpu.injected() & event::VALID, cpu.area.own.nmi_waits), (0, 0));
    }

    /// An entry with both is refused, or the NMI replaces what has yet to be reported.
    #[test]
    fn an_nmi_lets_shadows_events_and_single_steps_pass() {
        for (field, value) in [
            (vmcs::GUEST_INTERRUPTIBILITY, blocking::STI),
            (vmcs::GUEST_INTERRUPTIBILITY, blocking::MOV_SS),
            (vmcs::GUEST_PENDING_DEBUG, 1 << 14),
        ] {
            let mut cpu = watched();
            cpu.set(field, value);
            assert_eq!(cpu.exit(reason::NMI), Next::Run);
            assert_eq!((cpu.injected() & event::VALID, asked(&cpu)), (0, STEP));
            cpu.set(field, 0);
            assert_eq!(cpu.exit(reason::MONITOR_TRAP), Next::Run);
            assert_eq!((cpu.injected(), asked(&cpu)), (event::INJECT_NMI, 0));
        }
        // #UD of an instruction that exited, and an NMI on the way in.
        let mut cpu = watched();
        assert_eq!(cpu.exit(reason::VMWRITE), Next::Run);
        assert_eq!(turn_back(&mut cpu), Next::Run);
        assert_eq!((cpu.injected(), asked(&cpu)), (event::INVALID_OPCODE, STEP));
        assert_eq!(cpu.exit(reason::MONITOR_TRAP), Next::Run);
        assert_eq!(cpu.injected(), event::INJECT_NMI);
        // A CPU that waits for a start-up IPI takes none.
        let mut cpu = watched();
        cpu.set(vmcs::GUEST_ACTIVITY, activity::WAIT_FOR_SIPI);
        assert_eq!(cpu.exit(reason::MONITOR_TRAP), Next::Run);
        assert_eq!(turn_back(&mut cpu), Next::Run);
        assert_eq!((cpu.injected() & event::VALID, asked(&cpu)), (0, 0));
    }

    /// An event that was in delivery at the last exit has been handed over by its answer.
    #[test]
    fn an_nmi_in_the_hypervisor_is_given_on_the_way_in() {
        let mut cpu = watched();
        cpu.set(vmcs::VECTORING, event::VALID | 0xEC);
        assert_eq!(cpu.exit(reason::CPUID), Next::Run);
        assert_eq!(cpu.injected(), event::VALID | 0xEC);
        let rip = cpu.get(vmcs::GUEST_RIP);
        assert_eq!(turn_back(&mut cpu), Next::Run);
        assert_eq!((cpu.injected(), asked(&cpu)), (event::VALID | 0xEC, STEP));
        assert_eq!(cpu.get(vmcs::GUEST_RIP), rip, "the exit before is not answered twice");
        cpu.set(vmcs::VECTORING, 0);
        assert_eq!(cpu.exit(reason::MONITOR_TRAP), Next::Run);
        assert_eq!(cpu.injected(), event::INJECT_NMI);
    }

    /// Without the watch the way into the guest, or the gate, gives the NMI.
    #[test]
    fn an_nmi_that_waits_is_not_lost_at_the_end() {
        let mut cpu = watched();
        cpu.set(vmcs::GUEST_INTERRUPTIBILITY, blocking::NMI);
        assert_eq!(cpu.exit(reason::NMI), Next::Run);
        watch(&mut cpu.area, &mut cpu.hardware, Watch::Off);
        assert_eq!((pins(&cpu), cpu.area.cpu.gate.nmi.pending, cpu.area.own.nmi_waits), (0, 1, 0));
        // As natively: an NMI does not exit.
        assert_eq!(cpu.exit(reason::MONITOR_TRAP), Next::Run);
        assert_eq!(asked(&cpu), 0, "the processor refuses a window without virtual NMIs");
        let mut cpu = watched();
        cpu.set(vmcs::GUEST_INTERRUPTIBILITY, blocking::NMI);
        assert_eq!(cpu.exit(reason::NMI), Next::Run);
        assert_eq!(cpu.exit(reason::VMXOFF), Next::Leave);
        assert_eq!((cpu.area.cpu.gate.nmi.pending, cpu.area.own.nmi_waits), (1, 0));
    }

    #[test]
    fn a_triple_fault_with_nothing_to_go_back_to_is_one() {
        crate::nested::tests::install::<Vmx>();
        for mut cpu in [watched(), Cpu::attached()] {
            assert_eq!(cpu.exit(reason::TRIPLE_FAULT), Next::Leave);
            assert!(cpu.hardware.shut_down && cpu.hardware.nmis.is_empty() && !cpu.hardware.vmx_on);
        }
    }

    /// Linux 6.1 executes VMXOFF and clears CR4.VMXE on a CPU that it stops in a panic.
    #[test]
    fn a_cpu_that_is_held_is_not_released() {
        let mut cpu = watched();
        cpu.area.cpu.is_held = 1;
        cpu.set(vmcs::GUEST_RFLAGS, 2 | 0x41);
        assert_eq!(cpu.exit(reason::VMXOFF), Next::Run);
        assert_eq!((cpu.get(vmcs::GUEST_RIP), cpu.get(vmcs::GUEST_RFLAGS)), (RIP + 3, 2));
        assert_eq!(write_control(&mut cpu, 4, CR4 & !cr4::VMXE), Next::Run);
        assert_eq!(cpu.area.own.foreign, 1);
        // The next life has its own view of CR4.
        put_back(&mut cpu.area, &mut cpu.hardware, &SavedCpu { cr4: 0x26F0 & !cr4::VMXE, ..saved() }, ROOT);
        assert_eq!((cpu.get(vmcs::GUEST_CR4), cpu.get(vmcs::CR4_SHADOW)), (0x26F0, 0x26F0));
        assert_eq!(cpu.area.own.foreign, 0);
    }

    fn saved() -> SavedCpu {
        SavedCpu {
            cr0: 0x8005_0033,
            cr3: 0x1234_5000,
            cr4: CR4 & !cr4::VMXE,
            rip: 0xFFFF_FFFF_C000_0000,
            rsp: 0xFFFF_C900_0000_0000,
            rflags: 0x46,
            registers: [3, 5, 12, 13, 14, 15],
            fs_base: 0x7F00,
            gs_base: 0xFFFF_8880_0000_0000,
            kernel_gs_base: 7,
            data_selectors: [0, 0x2B],
            gdtr: DescriptorTable { limit: 0x7F, base_virt: 0xFFFF_FE00_0000_1000, ..Default::default() },
            idtr: DescriptorTable { limit: 0xFFF, base_virt: 0xFFFF_FE00_0000_0000, ..Default::default() },
            ..SavedCpu::default()
        }
    }

    /// Whatever the CPU came to: here it was reset, and runs in real mode with an NMI and #MC to get.
    #[test]
    fn a_cpu_goes_on_where_it_was() {
        let mut cpu = watched();
        cpu.hardware.msrs.insert(msr::KERNEL_GS_BASE, 0);
        let before = cpu.hardware.fields.clone();
        cpu.area.cpu.interrupted.rip = 0x1234;
        assert_eq!(cpu.exit(reason::INIT), Next::Run);
        cpu.set(vmcs::GUEST_DEBUGCTL, 0x41);
        cpu.set(vmcs::GUEST_PAT, 0);
        cpu.set(vmcs::GUEST_SYSENTER_EIP, 1);
        cpu.set(vmcs::GUEST_PENDING_DEBUG, 1 << 14);
        cpu.set(vmcs::GUEST_INTERRUPTIBILITY, blocking::NMI);
        cpu.set(vmcs::ENTRY_INTERRUPTION, event::MACHINE_CHECK);
        (cpu.area.own.nmi_waits, cpu.area.cpu.gate.nmi.pending) = (1, 1);
        cpu.area.own.exit.event = event::INJECT_NMI;
        machine_check::note(&mut cpu.area, &mut cpu.hardware, false);
        put_back(&mut cpu.area, &mut cpu.hardware, &saved(), ROOT);
        let saved = saved();
        for (field, expected) in [
            (vmcs::GUEST_CR0, saved.cr0),
            (vmcs::CR0_SHADOW, saved.cr0),
            (vmcs::GUEST_CR3, saved.cr3),
            (vmcs::GUEST_CR4, CR4),
            (vmcs::CR4_SHADOW, CR4),
            (vmcs::GUEST_RIP, saved.rip),
            (vmcs::GUEST_RSP, saved.rsp),
            (vmcs::GUEST_RFLAGS, 0x46),
            (vmcs::GUEST_DR7, DR7_CLEAR),
            (vmcs::GUEST_FS_BASE, 0x7F00),
            (vmcs::GUEST_GS_BASE, saved.gs_base),
            (vmcs::GUEST_ES_SELECTOR, 0x2B),
            (vmcs::GUEST_ES_RIGHTS, 0xC0F3),
            (vmcs::GUEST_ES_RIGHTS + 6, vmcs::UNUSABLE),
            (vmcs::GUEST_TR_BASE, TSS),
            (vmcs::GUEST_TR_RIGHTS, 0x8B),
            (vmcs::GUEST_GDTR_BASE, saved.gdtr.base_virt),
            (vmcs::GUEST_IDTR_LIMIT, 0xFFF),
            (vmcs::GUEST_ACTIVITY, activity::ACTIVE),
            (vmcs::GUEST_INTERRUPTIBILITY, 0),
            (vmcs::GUEST_PENDING_DEBUG, 0),
            (vmcs::ENTRY_INTERRUPTION, 0),
            (vmcs::EPT_POINTER, capture::ept_pointer(ROOT, Depth::Four)),
        ] {
            assert_eq!(cpu.get(field), expected, "{field:#x}");
        }
        // All else, controls and host state too, is as after the attach.
        let instant = [vmcs::GUEST_RIP, vmcs::GUEST_RSP, vmcs::GUEST_RFLAGS, vmcs::EPT_POINTER];
        let es = [0x0800, 0x4800, 0x4814, 0x6806];
        let bases = [vmcs::GUEST_FS_BASE, vmcs::GUEST_GS_BASE];
        let report = |field: &u32| field >> 10 & 3 == 1;
        for (field, value) in before {
            if !report(&field) && !instant.iter().chain(&es).chain(&bases).any(|known| *known == field) {
                assert_eq!(cpu.get(field), value, "{field:#x}");
            }
        }
        assert_eq!(cpu.get(vmcs::ENTRY_CONTROLS) as u32 & entry::IA32E_MODE_GUEST, entry::IA32E_MODE_GUEST);
        assert_eq!((pins(&cpu), cpu.area.own.watched), (ON, 1), "the next life is watched as well");
        assert_eq!((cpu.area.own.nmi_waits, cpu.area.cpu.gate.nmi.pending, cpu.area.own.foreign), (0, 0, 0));
        assert!(!machine_check::is_noted(&cpu.area) && cpu.area.own.exit.event == 0);
        assert!(cpu.hardware.msrs[&msr::KERNEL_GS_BASE] == 7);
        let registers = [3, 5, 12, 13, 14, 15].map(|number: usize| *cpu.register(number));
        assert_eq!((*cpu.register(0), registers), (MERCURY_ROLLED_BACK, saved.registers));
        // The entry that follows gets nothing of the other life.
        assert_eq!(cpu.exit(reason::MONITOR_TRAP), Next::Run);
        assert_eq!((cpu.injected() & event::VALID, asked(&cpu)), (0, 0));
    }
}
