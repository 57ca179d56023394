//! MSRs of the guest: the accesses that are intercepted, and the meaning of a write.
//!
//! Intercepted are EFER, whose SVME bit is the switch itself, and VM_HSAVE_PA. Writes are intercepted of
//! PAT, which lives in the control block under nested paging, and of the microcode trigger. The processor
//! also intercepts by itself all MSRs outside of the map's three ranges, AMD's SMCA banks among them (APM
//! vol. 2, 15.11; HARDWARE 0.2). Those are executed for real.

use mercury_abi::code::Code;
use mercury_abi::shared::ExitReason;
use mercury_preflight::bits::efer;

use super::{Area, guests};
use crate::exit::{Answer, Fault};
use crate::msr::{log_access, read_through, write_through};
use crate::publish;
use crate::x86::{Hardware, msr};

/// The MSR permission map (APM vol. 2, 15.11): two bits an MSR, read below write.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct PermissionMap([u8; 8192]);

/// Permission map, which all CPUs share.
pub static PERMISSION_MAP: PermissionMap = PermissionMap::new()
    .intercept(msr::EFER, READ | WRITE)
    .intercept(msr::PAT, WRITE)
    .intercept(msr::PATCH_LOADER, WRITE)
    .intercept(msr::VM_HSAVE_PA, READ | WRITE);

const READ: u8 = 1;
const WRITE: u8 = 2;

impl PermissionMap {
    const fn new() -> Self {
        Self([0; 8192])
    }

    const fn intercept(mut self, index: u32, accesses: u8) -> Self {
        let range = match index {
            0..=0x1FFF => 0,
            0xC000_0000..=0xC000_1FFF => 0x800,
            0xC001_0000..=0xC001_1FFF => 0x1000,
            _ => panic!("outside the map: always intercepted"),
        };
        let position = (index & 0x1FFF) as usize;
        self.0[range + position / 4] |= accesses << (position % 4 * 2);
        self
    }
}

/// Answers a read of an MSR by the guest.
pub fn read(area: &mut Area, hardware: &mut impl Hardware, index: u32) -> Answer {
    if index == msr::VM_HSAVE_PA {
        publish::count(area, ExitReason::MsrHsave);
        return Answer::Value(area.own.guest_hsave);
    }
    if index == msr::EFER {
        publish::count(area, ExitReason::MsrEfer);
        return Answer::Value(shown_efer(area));
    }
    publish::count(area, ExitReason::MsrPassThrough);
    read_through(area, hardware, index)
}

/// Answers a write of an MSR by the guest.
pub fn write(area: &mut Area, hardware: &mut impl Hardware, index: u32, value: u64) -> Answer {
    let (reason, answer) = match index {
        msr::EFER => (ExitReason::MsrEfer, write_efer(area, hardware, value)),
        msr::VM_HSAVE_PA => (ExitReason::MsrHsave, write_hsave(area, value)),
        msr::PAT => (ExitReason::MsrPat, write_pat(area, hardware, value)),
        // Loading microcode from the guest is not promised to work: natively it is (HARDWARE A-48).
        msr::PATCH_LOADER => (ExitReason::MsrMicrocode, Answer::Depart(Code::MicrocodeUpdate)),
        _ => (ExitReason::MsrPassThrough, write_through(hardware, index, value)),
    };
    // A kernel that panics wants no hypervisor any more, but may be put back to when it did.
    let released = answer == Answer::Depart(Code::SvmReleased);
    let answer = if released && area.cpu.is_held != 0 { Answer::Skip } else { answer };
    publish::count(area, reason);
    log_access(area, hardware, index, value, true, answer == Answer::Inject(Fault::GeneralProtection));
    answer
}

/// Returns EFER as the system reads it. If KVM may use SVM, SVME is the bit that KVM has set. Otherwise
/// SVME is set, to show that SVM is in use.
#[inline]
pub fn shown_efer(area: &mut Area) -> u64 {
    let ours = if guests::may(area) { 0 } else { msr::EFER_SVME };
    area.own.guest_efer | ours
}

/// Answers a write of EFER.
///
/// * Clearing SVME is how a kernel takes the processor out of SVM (6.1's crash path). It is a detach, and
///   the write is then executed natively (HARDWARE L-4), unless KVM clears it.
/// * So are writes that set bits which Mercury does not carry, or clear bits which the hypervisor itself
///   needs. A detach writes the guest's EFER while the hypervisor's tables are in use.
/// * Others are checked as the processor would: LMA is read-only, LME cannot change while paging, reserved
///   bits are #GP. The processor itself says which of the rest exist.
fn write_efer(area: &mut Area, hardware: &mut impl Hardware, value: u64) -> Answer {
    let current = area.own.guest_efer;
    let shared = guests::may(area);
    if value & msr::EFER_SVME == 0 && !shared {
        return Answer::Depart(Code::SvmReleased);
    }
    let reserved = !(efer::KNOWN | efer::FOREIGN | efer::SVME);
    if value & reserved != 0 || (value ^ current) & msr::EFER_LME != 0 {
        return Answer::Inject(Fault::GeneralProtection);
    }
    let lacking = efer::REQUIRED & !(value | msr::EFER_LMA);
    if value & efer::FOREIGN | lacking != 0 {
        return Answer::Depart(Code::EferUnsupported);
    }
    let Some(taken) = try_efer(area, hardware, value) else {
        return Answer::Inject(Fault::GeneralProtection);
    };
    let of_guest = if shared { value } else { current };
    let new = taken & !(msr::EFER_LMA | msr::EFER_SVME) | current & msr::EFER_LMA;
    area.own.guest_efer = new | of_guest & msr::EFER_SVME;
    area.control.efer = new | msr::EFER_SVME;
    guests::arrange(area);
    Answer::Skip
}

/// Returns the value that this processor makes of a guest's EFER; `None` if it refuses. The processor
/// itself is tried. Bits that are set now stay set meanwhile, for the hypervisor needs them.
fn try_efer(area: &Area, hardware: &mut impl Hardware, value: u64) -> Option<u64> {
    let own = area.own.attach_efer | msr::EFER_SVME;
    if !hardware.write_msr(msr::EFER, value | own) {
        return None;
    }
    let kept = hardware.read_msr(msr::EFER);
    let _ = hardware.write_msr(msr::EFER, own);
    Some(value & kept?)
}

/// Answers a write of VM_HSAVE_PA. Zero releases SVM (SNP initialization demands it, HARDWARE A-47), unless
/// KVM writes it. Another value is remembered.
fn write_hsave(area: &mut Area, value: u64) -> Answer {
    if value == 0 && !guests::may(area) {
        return Answer::Depart(Code::SvmReleased);
    }
    if value & 0xFFF != 0 || value >> 52 != 0 {
        return Answer::Inject(Fault::GeneralProtection);
    }
    area.own.guest_hsave = value;
    Answer::Skip
}

/// Answers a write of PAT. The value goes to the control block, which the processor uses, and to the MSR.
/// The next detach leaves it there, and QEMU 7.2 uses the MSR instead of the block (HARDWARE A-10). A PAT
/// whose first entry is not write-back would change the type of the nested tables themselves: the CPU
/// leaves.
fn write_pat(area: &mut Area, hardware: &mut impl Hardware, value: u64) -> Answer {
    if crate::msr::illegal_pat(value) != 0 {
        return Answer::Inject(Fault::GeneralProtection);
    }
    if value & 7 != 6 {
        return Answer::Depart(Code::PatUnsupported);
    }
    area.control.g_pat = value;
    write_through(hardware, msr::PAT, value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn intercepted(index: u32) -> u8 {
        let range = match index >> 16 {
            0 => 0,
            0xC000 => 0x800,
            _ => 0x1000,
        };
        let position = (index & 0x1FFF) as usize;
        PERMISSION_MAP.0[range + position / 4] >> (position % 4 * 2) & 3
    }

    #[test]
    fn map_holds_what_the_manual_says_and_nothing_else() {
        assert_eq!(intercepted(msr::EFER), READ | WRITE);
        assert_eq!(intercepted(msr::PAT), WRITE);
        assert_eq!(intercepted(msr::PATCH_LOADER), WRITE);
        assert_eq!(intercepted(msr::VM_HSAVE_PA), READ | WRITE);
        // The prototype's bytes, found by trial on two emulators.
        assert_eq!(PERMISSION_MAP.0[0x820], 3);
        assert_eq!(PERMISSION_MAP.0[0x1045], 0xC0);
        assert_eq!(PERMISSION_MAP.0[0x9D], 0x80);
        let bits: u32 = PERMISSION_MAP.0.iter().map(|byte| byte.count_ones()).sum();
        assert_eq!(bits, 6);
    }
}
