//! Fetches a CPU for a rollback, and puts it back.
//!
//! While a snapshot is the target of a rollback, NMIs exit. One that is the system's own is let through:
//! the intercept is taken off, so that the NMI is the first event that the processor delivers, and it
//! blocks others as ever. The IRET at its handler's end exits, so that the next NMI exits again (APM vol.
//! 2, 15.13.2 and 15.21.9).

use mercury_abi::restart::SavedCpu;
use mercury_abi::shared::ExitReason;
use mercury_abi::snapshot::{MERCURY_ROLLED_BACK, RollbackReason};

use super::capture::table;
use super::vmcb::{INTERCEPT_IRET, INTERCEPT_NMI, INTERCEPT_SHUTDOWN, Segment, TLB_FLUSH_ALL};
use super::{Area, guests, shadow};
use crate::address::HostPhys;
use crate::exit::Answer;
use crate::host::entry::Next;
use crate::snapshot::rollback::{self, Watch};
use crate::x86::msr::EFER_SVME;
use crate::x86::{DR7_CLEAR, Hardware, msr};
use crate::{machine_check, publish};

/// Index of KernelGSBase in [`super::vmcb::Vmcb::syscall`].
const KERNEL_GS_BASE: usize = 4;
/// DR6 with nothing to report.
const DR6_CLEAR: u64 = 0xFFFF_0FF0;

pub(super) fn watch(area: &mut Area, watch: Watch) {
    let intercepts = &mut area.control.intercept_misc1;
    *intercepts &= !(INTERCEPT_NMI | INTERCEPT_IRET | INTERCEPT_SHUTDOWN);
    if watch == Watch::On {
        *intercepts |= INTERCEPT_NMI | INTERCEPT_SHUTDOWN;
        // The first time it is the instant, when no guest of the system's has its own there.
        area.own.extended.keep(&area.control);
    } else {
        area.own.extended.forget();
    }
    if area.own.gif_is_clear != 0 {
        area.control.intercept_misc1 |= INTERCEPT_NMI;
    }
}

/// Returns true if an NMI was let through, and its handler has not returned.
pub(super) fn is_in_nmi(area: &Area) -> bool {
    area.control.intercept_misc1 & INTERCEPT_IRET != 0
}

/// Answers an NMI. It fetches this CPU for a rollback, or is the system's, and then waits while GIF is 0.
pub fn nmi(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    if rollback::wants(area) && rollback::join(area, hardware).is_ok() {
        publish::count(area, ExitReason::Other);
        return Answer::RetryFlushed;
    }
    if area.own.gif_is_clear != 0 {
        return guests::hold_nmi(area, hardware);
    }
    publish::count(area, ExitReason::Other);
    let intercepts = &mut area.control.intercept_misc1;
    *intercepts = *intercepts & !INTERCEPT_NMI | INTERCEPT_IRET;
    Answer::Retry
}

/// Answers the IRET of a handler of NMIs. A rollback that has asked for this CPU meanwhile gets it now.
pub fn nmi_ends(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    publish::count(area, ExitReason::Other);
    if rollback::wants(area) && rollback::join(area, hardware).is_ok() {
        return Answer::RetryFlushed;
    }
    watch(area, Watch::On);
    Answer::Retry
}

/// Answers a shutdown: the system cannot go on. If there is no snapshot to go back to, the machine ends as
/// it would natively. The control block's state of the CPU is not defined any more (APM vol. 2, 15.14.3).
pub fn shutdown(area: &mut Area, hardware: &mut impl Hardware) -> Result<Answer, Next> {
    publish::count(area, ExitReason::Other);
    // Not 0, which stands for none.
    let signature = area.control.rip | 1;
    match rollback::ask(area, hardware, RollbackReason::TripleFault, signature) {
        Ok(()) => Ok(Answer::RetryFlushed),
        Err(_) => Err(hardware.shut_down()),
    }
}

/// Puts the registers back that the kernel had at the instant of the snapshot, on the snapshot's tables. The
/// kernel itself restores MSRs that only it writes. After a shutdown the block's save area holds anything
/// (APM vol. 2, 15.14.3), so each of its fields is written.
pub(super) fn put_back(area: &mut Area, hardware: &mut impl Hardware, saved: &SavedCpu, root: HostPhys) {
    shadow::release_own(area);
    let Area { cpu, own, control, .. } = area;
    control.cs = cpu.gate.inward.cs;
    control.ss = cpu.gate.inward.ss;
    control.ds = data_segment(saved.data_selectors[0]);
    control.es = data_segment(saved.data_selectors[1]);
    control.fs = Segment { base: saved.fs_base, ..Segment::default() };
    control.gs = Segment { base: saved.gs_base, ..Segment::default() };
    // An NMI may come before the kernel has set these again, and finds its stack by the task register.
    own.extended.put(control);
    // The guest reads its PAT in the block. The processor's own goes with it.
    let _ = hardware.write_msr(msr::PAT, control.g_pat);
    control.syscall[KERNEL_GS_BASE] = saved.kernel_gs_base;
    control.gdtr = table(&saved.gdtr);
    control.idtr = table(&saved.idtr);
    control.cpl = 0;
    control.efer = own.attach_efer;
    // The system itself sets its SVM state again.
    own.guest_efer = own.attach_efer & !EFER_SVME;
    (own.gif_is_clear, own.nmi_held, own.enter_guest) = (0, 0, 0);
    guests::forget(own);
    (control.cr0, control.cr3, control.cr4) = (saved.cr0, saved.cr3, saved.cr4);
    (control.cr2, control.dr6, control.dr7) = (0, DR6_CLEAR, DR7_CLEAR);
    (control.rip, control.rsp, control.rflags) = (saved.rip, saved.rsp, saved.rflags);
    control.rax = MERCURY_ROLLED_BACK;
    let registers = &mut cpu.gate.outward.registers;
    let [rbx, rbp, r12, r13, r14, r15] = saved.registers;
    *registers = [0, 0, 0, rbx, 0, rbp, 0, 0, 0, 0, 0, 0, r12, r13, r14, r15];
    control.interrupt_shadow = 0;
    (control.inject_event, control.exit_event) = (0, 0);
    control.nested_cr3 = root.as_u64();
    control.tlb_control = TLB_FLUSH_ALL;
    control.await_window(false);
    control.virtual_interrupt = 0;
    guests::arrange(area);
    watch(area, Watch::On);
    machine_check::forget(area);
    machine_check::end(hardware);
}

/// Returns a data segment of 64-bit mode, by its selector.
fn data_segment(selector: u64) -> Segment {
    let selector = selector as u16;
    let Some(rights) = rollback::data_rights(selector) else {
        return Segment { selector, ..Segment::default() };
    };
    Segment { selector, attributes: rights & 0xFF | rights >> 4 & 0xF00, limit: u32::MAX, base: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Attached;
    use crate::model::LINUX_PAT;
    use crate::svm::refusal;
    use crate::svm::vmcb::{GuestState, INTERCEPT_MISC1, Vmcb, event, exit_code};

    const ROOT: HostPhys = HostPhys::new(0x77_7000);
    const ALL: u32 = INTERCEPT_NMI | INTERCEPT_IRET | INTERCEPT_SHUTDOWN;

    fn watched() -> Attached {
        let mut cpu = Attached::new();
        cpu.area.cpu.on_snapshot = 1;
        watch(&mut cpu.area, Watch::On);
        assert_eq!(cpu.area.control.intercept_misc1 & ALL, INTERCEPT_NMI | INTERCEPT_SHUTDOWN);
        cpu
    }

    /// The guest of the system's may have its own task register in the processor when its CPU is fetched.
    #[test]
    fn a_guests_registers_do_not_come_along() {
        let mut cpu = Attached::new();
        cpu.area.control.tr.base = 0x1234_0000;
        cpu.area.control.syscall[1] = 0x5678;
        watch(&mut cpu.area, Watch::On);
        (cpu.area.control.tr.base, cpu.area.control.syscall[1]) = (0, 0);
        watch(&mut cpu.area, Watch::On);
        put_back(&mut cpu.area, &mut cpu.hardware, &SavedCpu::default(), ROOT);
        assert_eq!((cpu.area.control.tr.base, cpu.area.control.syscall[1]), (0x1234_0000, 0x5678));
        // The next snapshot keeps its own.
        watch(&mut cpu.area, Watch::On);
        assert_eq!(cpu.area.own.extended.tr.base, 0x1234_0000);
        cpu.area.control.tr.base = 0x9000;
        watch(&mut cpu.area, Watch::Off);
        watch(&mut cpu.area, Watch::On);
        assert_eq!(cpu.area.own.extended.tr.base, 0x9000);
    }

    /// A CPU that goes offline beneath a snapshot does not end the watch, and comes back for another one.
    #[test]
    fn a_cpu_that_attaches_knows_no_instant() {
        let mut cpu = watched();
        crate::svm::guests::attach(&mut cpu.area);
        cpu.area.control.tr.base = 0x9000;
        watch(&mut cpu.area, Watch::On);
        assert_eq!(cpu.area.own.extended.tr.base, 0x9000);
    }

    /// Returns all that VMRUN and VMLOAD read of the save area.
    fn loaded(block: &Vmcb) -> String {
        let segments = [block.fs, block.gs, block.ldtr, block.tr];
        let numbers = [block.efer, block.s_cet, block.ssp, block.isst_addr, block.g_pat, block.spec_ctrl];
        format!("{:?} {segments:?} {numbers:x?} {:x?}", GuestState::of(block), block.syscall)
    }

    /// The processor leaves any bits in the save area of a CPU that has shut down.
    #[test]
    fn nothing_of_a_shutdown_goes_on() {
        const SAVE_AREA: core::ops::Range<usize> = 0x400..0x1000;
        let went_on = |rubbish: Option<u8>| {
            let mut cpu = Attached::new();
            cpu.area.cpu.on_snapshot = 1;
            let control = &mut cpu.area.control;
            (control.s_cet, control.ssp, control.isst_addr, control.spec_ctrl) = (1, 2, 3, 4);
            (control.tr.base, control.ldtr.selector, control.syscall[1]) = (5, 6, 7);
            watch(&mut cpu.area, Watch::On);
            if let Some(rubbish) = rubbish {
                let bytes = core::ptr::from_mut(&mut cpu.area.control).cast::<u8>();
                // SAFETY: bytes of the block, which is made of integers: any bits are a value.
                unsafe { bytes.add(SAVE_AREA.start).write_bytes(rubbish, SAVE_AREA.len()) };
                assert!(!refusal::none(&cpu.area.control));
            }
            cpu.hardware.msrs.insert(msr::PAT, 0x0407_0506_0001_0106);
            let saved = SavedCpu { cr0: 0x8005_0033, cr4: 0x6F0, rip: 9, ..SavedCpu::default() };
            put_back(&mut cpu.area, &mut cpu.hardware, &saved, ROOT);
            assert!(refusal::none(&cpu.area.control), "{:?}", refusal::first(&cpu.area.control));
            assert_eq!(cpu.hardware.read_msr(msr::PAT), Some(LINUX_PAT));
            loaded(&cpu.area.control)
        };
        let right = went_on(None);
        for rubbish in [0, 0x5A, 0xA5, 0xFF] {
            assert_eq!(went_on(Some(rubbish)), right);
        }
    }

    /// The processor's note would make the next machine check a shutdown.
    #[test]
    fn a_machine_check_is_over() {
        let mut cpu = watched();
        cpu.hardware.msrs.insert(msr::MCG_STATUS, 0b111);
        put_back(&mut cpu.area, &mut cpu.hardware, &SavedCpu::default(), ROOT);
        assert_eq!(cpu.hardware.read_msr(msr::MCG_STATUS), Some(0));
        // A processor without machine checks raises #GP.
        cpu.hardware.msrs.remove(&msr::MCG_STATUS);
        put_back(&mut cpu.area, &mut cpu.hardware, &SavedCpu::default(), ROOT);
        assert_eq!(cpu.hardware.read_msr(msr::MCG_STATUS), None);
    }

    /// The processor delivers it by itself, and blocks others until the handler's IRET.
    #[test]
    fn an_nmi_of_the_systems_is_let_through() {
        let mut cpu = watched();
        let rip = cpu.area.control.rip;
        assert_eq!(cpu.exit(exit_code::NMI), Next::Run);
        assert_eq!(cpu.area.control.intercept_misc1 & ALL, INTERCEPT_IRET | INTERCEPT_SHUTDOWN);
        assert!(is_in_nmi(&cpu.area));
        assert_eq!(cpu.exit(exit_code::IRET), Next::Run);
        assert!(!is_in_nmi(&cpu.area));
        assert_eq!(cpu.area.control.intercept_misc1 & ALL, INTERCEPT_NMI | INTERCEPT_SHUTDOWN);
        assert_eq!((cpu.area.control.rip, cpu.enter()), (rip, 0), "nothing is injected, nothing skipped");
        watch(&mut cpu.area, Watch::Off);
        assert_eq!(cpu.area.control.intercept_misc1, INTERCEPT_MISC1);
    }

    #[test]
    fn a_shutdown_with_nothing_to_go_back_to_is_one() {
        crate::nested::tests::install::<crate::svm::Svm>();
        let mut cpu = watched();
        assert_eq!(cpu.exit(exit_code::SHUTDOWN), Next::Leave);
        assert!(cpu.hardware.shut_down && cpu.hardware.nmis.is_empty());
    }

    /// Linux 6.1 switches SVM off on a CPU that it stops in a panic.
    #[test]
    fn a_cpu_that_is_held_is_not_released() {
        let release = |cpu: &mut Attached, index: u32| {
            (*cpu.register(0), *cpu.register(2), *cpu.register(1)) = (0, 0, u64::from(index));
            cpu.area.control.exit_info1 = 1;
            cpu.exit(exit_code::MSR)
        };
        for index in [msr::EFER, msr::VM_HSAVE_PA] {
            let mut cpu = Attached::new();
            assert_eq!(release(&mut cpu, index), Next::Leave);
            let mut cpu = Attached::new();
            cpu.area.cpu.is_held = 1;
            let efer = cpu.area.control.efer;
            assert_eq!(release(&mut cpu, index), Next::Run);
            assert_eq!(cpu.exit(exit_code::STGI), Next::Run);
            assert_eq!((cpu.area.control.inject_event, cpu.area.control.efer), (0, efer));
        }
    }

    #[test]
    fn a_cpu_goes_on_where_it_was() {
        let mut cpu = watched();
        let control = &mut cpu.area.control;
        // Any state that the CPU came to.
        (control.cpl, control.cr0, control.efer, control.rip) = (3, 0x11, 0, 0x1234);
        (control.inject_event, control.exit_event) = (event::DEBUG, event::DEBUG);
        control.interrupt_shadow = 1;
        control.await_window(true);
        cpu.area.own.guest_efer = 0;
        cpu.area.cpu.gate.inward.cs.attributes = 0xA9B;
        let saved = SavedCpu {
            cr0: 0x8005_0033,
            cr3: 0x1234_5000,
            cr4: 0x6F0,
            rip: 0xFFFF_FFFF_C000_0000,
            rsp: 0xFFFF_C900_0000_0000,
            rflags: 0x46,
            registers: [3, 5, 12, 13, 14, 15],
            gs_base: 0xFFFF_8880_0000_0000,
            kernel_gs_base: 7,
            data_selectors: [0, 0x2B],
            ..SavedCpu::default()
        };
        put_back(&mut cpu.area, &mut cpu.hardware, &saved, ROOT);
        let control = &cpu.area.control;
        assert_eq!((control.cr0, control.cr3, control.cr4), (saved.cr0, saved.cr3, saved.cr4));
        assert_eq!((control.rip, control.rsp, control.rflags), (saved.rip, saved.rsp, 0x46));
        assert_eq!(
            (control.rax, control.cpl, control.efer),
            (MERCURY_ROLLED_BACK, 0, cpu.area.own.attach_efer)
        );
        assert_eq!((control.gs.base, control.syscall[KERNEL_GS_BASE]), (saved.gs_base, 7));
        assert_eq!((control.cs.attributes, control.ds.attributes, control.es.attributes), (0xA9B, 0, 0xCF3));
        assert_eq!(control.inject_event | control.exit_event | control.interrupt_shadow, 0);
        // The next life is beneath the snapshot from its first instruction on.
        let watched = INTERCEPT_MISC1 | INTERCEPT_NMI | INTERCEPT_SHUTDOWN;
        assert_eq!((control.intercept_misc1, control.virtual_interrupt), (watched, 0));
        assert_eq!((control.nested_cr3, control.tlb_control), (ROOT.as_u64(), TLB_FLUSH_ALL));
        let registers = [3, 5, 12, 13, 14, 15].map(|number: usize| *cpu.register(number));
        assert_eq!(registers, saved.registers);
    }
}
