//! INIT, the start-up IPI and shutdown. They always exit (SDM volume 3, "Other causes of VM exits";
//! HARDWARE I-7). The answers let a CPU come up as it would natively, with the hypervisor still beneath it:
//! an unrestricted guest runs in real mode and finds its way to long mode by itself. The driver detaches a
//! CPU before the kernel takes it offline. So these exits come from code that does not ask: a crash kernel,
//! a forced reset.

use mercury_abi::code::Code;
use mercury_abi::shared::{ExitReason, LogKind};
use mercury_preflight::bits::{cr0, cr4};
use mercury_preflight::vmx::entry;

use super::Area;
use super::capture::{self, CR0_NE};
use super::exits::{await_window, flush};
use super::vmcs::{self, UNUSABLE, activity};
use crate::exit::{Answer, Fault};
use crate::host::entry::Next;
use crate::x86::{DR7_CLEAR, Hardware, msr, msr::EFER_LMA, msr::EFER_LME};
use crate::{machine_check, publish};

/// CR0.NW and CR0.CD, which INIT leaves alone.
const CR0_CACHES: u64 = 0b11 << 29;
const RDX: usize = 2;

/// Answers INIT. An application processor waits for a start-up IPI. The boot processor would begin at the
/// reset vector, in firmware that knows no hypervisor. It shuts down instead, which resets the machine all
/// the same.
///
/// The state is that of SDM volume 3, table "IA-32 and Intel 64 processor states following power-up, reset,
/// or INIT". No instruction runs before a start-up IPI.
pub fn init(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    const BOOT_PROCESSOR: u64 = 1 << 8;
    const REAL_MODE_DATA: u64 = 0x93;
    const REAL_MODE_CODE: u64 = 0x9B;
    const LDT: u64 = 0x82;
    const BUSY_TSS: u64 = 0x8B;
    if hardware.read_msr(msr::APIC_BASE).is_some_and(|base| base & BOOT_PROCESSOR != 0) {
        return shut_down(area, hardware);
    }
    publish::count(area, ExitReason::Other);
    let [signature, ..] = hardware.cpuid(1, 0);
    area.cpu.gate.outward.registers = [0; 16];
    area.cpu.gate.outward.registers[RDX] = u64::from(signature);
    area.cpu.leave_pending = 0;
    area.own.foreign = 1;
    let caches = hardware.vmread(vmcs::GUEST_CR0) & CR0_CACHES;
    for (field, value) in [
        (vmcs::GUEST_CR0, caches | cr0::ET | CR0_NE),
        (vmcs::CR0_MASK, CR0_NE),
        (vmcs::CR0_SHADOW, caches | cr0::ET),
        (vmcs::GUEST_CR4, cr4::VMXE),
        (vmcs::CR4_SHADOW, 0),
        (vmcs::GUEST_CR3, 0),
        (vmcs::GUEST_EFER, 0),
        (vmcs::ENTRY_CONTROLS, u64::from(area.own.controls.entry & !entry::IA32E_MODE_GUEST)),
        (vmcs::GUEST_RFLAGS, 2),
        (vmcs::GUEST_RIP, 0xFFF0),
        (vmcs::GUEST_RSP, 0),
        (vmcs::GUEST_DR7, DR7_CLEAR),
        (vmcs::GUEST_GDTR_BASE, 0),
        (vmcs::GUEST_GDTR_LIMIT, 0xFFFF),
        (vmcs::GUEST_IDTR_BASE, 0),
        (vmcs::GUEST_IDTR_LIMIT, 0xFFFF),
        (vmcs::GUEST_INTERRUPTIBILITY, 0),
        (vmcs::GUEST_PENDING_DEBUG, 0),
        (vmcs::ENTRY_INTERRUPTION, 0),
        (vmcs::GUEST_ACTIVITY, activity::WAIT_FOR_SIPI),
    ] {
        hardware.vmwrite(field, value);
    }
    for number in 0..6 {
        put_segment(hardware, number, 0, 0, REAL_MODE_DATA);
    }
    put_segment(hardware, 1, 0xF000, 0xFFFF_0000, REAL_MODE_CODE);
    put_segment(hardware, 6, 0, 0, LDT);
    put_segment(hardware, 7, 0, 0, BUSY_TSS);
    area.cpu.gate.nmi.pending = 0;
    area.own.nmi_waits = 0;
    machine_check::forget(area);
    await_window(area, hardware, false);
    flush(area, hardware);
    Next::Run
}

fn put_segment(hardware: &mut impl Hardware, number: u32, selector: u64, base: u64, rights: u64) {
    hardware.vmwrite(vmcs::GUEST_ES_SELECTOR + 2 * number, selector);
    hardware.vmwrite(vmcs::GUEST_ES_BASE + 2 * number, base);
    hardware.vmwrite(vmcs::GUEST_ES_LIMIT + 2 * number, 0xFFFF);
    hardware.vmwrite(vmcs::GUEST_ES_RIGHTS + 2 * number, rights);
}

/// Answers the start-up IPI: execution begins at its vector's page (SDM, "MP initialization protocol").
pub fn start_up(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    publish::count(area, ExitReason::Other);
    let vector = area.own.exit.info1 & 0xFF;
    hardware.vmwrite(vmcs::GUEST_CS_SELECTOR, vector << 8);
    hardware.vmwrite(vmcs::GUEST_ES_BASE + 2, vector << 12);
    hardware.vmwrite(vmcs::GUEST_RIP, 0);
    hardware.vmwrite(vmcs::GUEST_ACTIVITY, activity::ACTIVE);
    Next::Run
}

/// Answers a write to CR0 that clears NE, or sets it again: real-mode code of a CPU that was reset. The
/// shadow gets the guest's value. EFER.LMA and the entry's control follow paging (SDM, "Guest control
/// registers").
pub fn write_cr0(hardware: &mut impl Hardware, value: u64) -> Answer {
    const NW: u64 = 1 << 29;
    let efer = hardware.vmread(vmcs::GUEST_EFER);
    let to_long_mode = value & cr0::PG != 0 && efer & EFER_LME != 0;
    let illegal = value >> 32 != 0
        || value & cr0::PG != 0 && value & cr0::PE == 0
        || value & NW != 0 && value & cr0::CD == 0
        || to_long_mode && hardware.vmread(vmcs::GUEST_CR4) & cr4::PAE == 0;
    if illegal {
        return Answer::Inject(Fault::GeneralProtection);
    }
    let controls = hardware.vmread(vmcs::ENTRY_CONTROLS);
    let mode = u64::from(entry::IA32E_MODE_GUEST);
    let (efer, controls) =
        if to_long_mode { (efer | EFER_LMA, controls | mode) } else { (efer & !EFER_LMA, controls & !mode) };
    hardware.vmwrite(vmcs::GUEST_EFER, efer);
    hardware.vmwrite(vmcs::ENTRY_CONTROLS, controls);
    hardware.vmwrite(vmcs::GUEST_CR0, value | CR0_NE);
    hardware.vmwrite(vmcs::CR0_SHADOW, value);
    Answer::Skip
}

/// Shuts down natively after a triple fault, or a CPU that can neither go on nor leave. The CPU is out of
/// VMX operation, in which INIT would be held back (HARDWARE M-1). The machine reacts as it always does.
pub fn shut_down(area: &mut Area, hardware: &mut impl Hardware) -> Next {
    let exit = &area.own.exit;
    let arguments = [
        u64::from(Code::CpuReset as u32),
        mercury_abi::shared::EXIT_CODE_VMX | exit.code,
        exit.registers[4],
        0,
        0,
    ];
    publish::count(area, ExitReason::Other);
    publish::log(area, LogKind::Left, area.cpu.exit_tsc, arguments);
    publish::departed(area, Code::CpuReset);
    capture::leave_vmx(area, hardware);
    hardware.shut_down()
}

const _: () = assert!(UNUSABLE == 1 << 16);
