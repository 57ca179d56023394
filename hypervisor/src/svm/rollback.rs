//! A CPU is fetched for a rollback, and put back.
//!
//! While a snapshot is kept NMIs exit. One that is the system's own is let through: intercepted no more, it is the first
//! thing that the processor delivers, and it blocks others as ever. The IRET at its handler's end exits, so that the next
//! NMI does again (APM vol. 2, 15.13.2 and 15.21.9).

use mercury_abi::restart::SavedCpu;
use mercury_abi::shared::ExitReason;
use mercury_abi::snapshot::{MERCURY_ROLLED_BACK, RollbackReason};

use super::Area;
use super::capture::{segment, table};
use super::vmcb::{INTERCEPT_IRET, INTERCEPT_NMI, INTERCEPT_SHUTDOWN, Segment, TLB_FLUSH_ALL};
use crate::exit::Answer;
use crate::host::entry::Next;
use crate::snapshot::rollback::{self, Means, Watch};
use crate::x86::{DR7_CLEAR, Hardware};
use crate::{machine_check, nested, publish};

/// AMD's means.
pub const MEANS: Means<super::Svm> = Means { watch, resume };

/// Index of KernelGSBase in [`super::vmcb::Vmcb::syscall`].
const KERNEL_GS_BASE: usize = 4;
/// DR6 with nothing to report.
const DR6_CLEAR: u64 = 0xFFFF_0FF0;
/// A flat data segment, present, writable and accessed; its privilege level is in bits 6:5.
const FLAT_DATA: u16 = 0xC93;

fn watch(area: &mut Area, watch: Watch) {
    let intercepts = &mut area.control.intercept_misc1;
    *intercepts &= !(INTERCEPT_NMI | INTERCEPT_IRET | INTERCEPT_SHUTDOWN);
    if watch == Watch::On {
        *intercepts |= INTERCEPT_NMI | INTERCEPT_SHUTDOWN;
    }
}

/// An NMI: to fetch this CPU, or the system's.
pub fn nmi(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    publish::count(area, ExitReason::Other);
    if rollback::wants(area) && rollback::join(area, hardware).is_ok() {
        return Answer::RetryFlushed;
    }
    let intercepts = &mut area.control.intercept_misc1;
    *intercepts = *intercepts & !INTERCEPT_NMI | INTERCEPT_IRET;
    Answer::Retry
}

/// The handler of an NMI returns. Whoever was to be fetched meanwhile comes now.
pub fn nmi_ends(area: &mut Area, hardware: &mut impl Hardware) -> Answer {
    publish::count(area, ExitReason::Other);
    if rollback::wants(area) && rollback::join(area, hardware).is_ok() {
        return Answer::RetryFlushed;
    }
    watch(area, Watch::On);
    Answer::Retry
}

/// The system cannot go on. If there is nothing to go back to, the machine ends as it would have natively: what the
/// control block says of the CPU is not defined any more (APM vol. 2, 15.14.3).
pub fn shutdown(area: &mut Area, hardware: &mut impl Hardware) -> Result<Answer, Next> {
    publish::count(area, ExitReason::Other);
    match rollback::ask(area, hardware, RollbackReason::TripleFault) {
        Ok(()) => Ok(Answer::RetryFlushed),
        Err(_) => Err(hardware.shut_down()),
    }
}

/// What the kernel has in its registers at the instant of a snapshot; MSRs that only it writes it restores itself.
fn resume(area: &mut Area, saved: &SavedCpu) {
    let Area { cpu, own, control, .. } = area;
    control.cs = segment(&cpu.gate.inward.cs);
    control.ss = segment(&cpu.gate.inward.ss);
    control.ds = data_segment(saved.data_selectors[0]);
    control.es = data_segment(saved.data_selectors[1]);
    control.fs = Segment { base: saved.fs_base, ..Segment::default() };
    control.gs = Segment { base: saved.gs_base, ..Segment::default() };
    control.syscall[KERNEL_GS_BASE] = saved.kernel_gs_base;
    control.gdtr = table(&saved.gdtr);
    control.idtr = table(&saved.idtr);
    control.cpl = 0;
    control.efer = own.attach_efer;
    own.guest_efer = own.attach_efer;
    (control.cr0, control.cr3, control.cr4) = (saved.cr0, saved.cr3, saved.cr4);
    (control.dr6, control.dr7) = (DR6_CLEAR, DR7_CLEAR);
    (control.rip, control.rsp, control.rflags) = (saved.rip, saved.rsp, saved.rflags);
    control.rax = MERCURY_ROLLED_BACK;
    let registers = &mut cpu.gate.outward.registers;
    let [rbx, rbp, r12, r13, r14, r15] = saved.registers;
    *registers = [0, 0, 0, rbx, 0, rbp, 0, 0, 0, 0, 0, 0, r12, r13, r14, r15];
    control.interrupt_shadow = 0;
    (control.inject_event, control.exit_event) = (0, 0);
    control.nested_cr3 = nested::root().as_u64();
    control.tlb_control = TLB_FLUSH_ALL;
    control.await_window(false);
    watch(area, Watch::Off);
    machine_check::forget(area);
}

/// A data segment of 64-bit mode, by its selector.
fn data_segment(selector: u64) -> Segment {
    let selector = selector as u16;
    if selector & !3 == 0 {
        return Segment { selector, ..Segment::default() };
    }
    Segment { selector, attributes: FLAT_DATA | (selector & 3) << 5, limit: u32::MAX, base: 0 }
}
