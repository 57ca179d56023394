//! A processor and an area for tests on the host.

use std::collections::BTreeMap;

use mercury_abi::shared::SharedCpu;

use crate::cpu::Area;
use crate::svm::vmcb::{INTERCEPT_MISC1, INTERCEPT_MISC2};
use crate::x86::{Hardware, msr};

/// MSRs as a table; what is not in it raises #GP.
#[derive(Default)]
pub struct Model {
    pub msrs: BTreeMap<u32, u64>,
    /// Bits of EFER that this processor does not have: setting one raises #GP.
    pub efer_absent: u64,
    /// Bits of EFER that may not be cleared while the hypervisor runs.
    pub efer_must: u64,
    /// Bits of EFER that it takes and forgets, as emulators do.
    pub efer_ignored: u64,
    tsc: u64,
}

impl Hardware for Model {
    fn read_msr(&mut self, index: u32) -> Option<u64> {
        self.msrs.get(&index).copied()
    }

    fn write_msr(&mut self, index: u32, value: u64) -> bool {
        let (absent, ignored) =
            if index == msr::EFER { (self.efer_absent, self.efer_ignored) } else { (0, 0) };
        if value & absent != 0 {
            return false;
        }
        assert!(index != msr::EFER || self.efer_must & !value == 0, "EFER {value:#x} in the hypervisor");
        self.msrs.get_mut(&index).is_some_and(|slot| {
            *slot = value & !ignored;
            true
        })
    }

    fn tsc(&mut self) -> u64 {
        self.tsc += 1;
        self.tsc
    }

    fn cr2(&mut self) -> u64 {
        0xC0FF_EE00
    }

    fn dr6(&mut self) -> u64 {
        0xFFFF_0FF0
    }

    fn dr7(&mut self) -> u64 {
        crate::x86::DR7_CLEAR
    }
}

/// EFER of a running Linux.
pub const LINUX_EFER: u64 = 0xD01;
/// PAT of a running Linux.
pub const LINUX_PAT: u64 = 0x0407_0506_0007_0106;

/// An attached CPU between two exits.
pub struct Attached {
    pub area: Box<Area>,
    pub hardware: Model,
    _shared: Box<SharedCpu>,
}

impl Attached {
    pub fn new() -> Self {
        // SAFETY: both are made of integers only; all zeros is valid.
        let (mut area, mut shared) = unsafe {
            (Box::<Area>::new_zeroed().assume_init(), Box::<SharedCpu>::new_zeroed().assume_init())
        };
        area.cpu.gate.shared_virt = (&raw mut *shared).expose_provenance() as u64;
        let control = &mut area.control;
        control.intercept_misc1 = INTERCEPT_MISC1;
        control.intercept_misc2 = INTERCEPT_MISC2;
        control.asid = 1;
        control.nested_control = 1;
        control.efer = LINUX_EFER | msr::EFER_SVME;
        control.cr0 = 0x8005_0033;
        control.cr4 = 0x6F0;
        control.cr3 = 0x1234_5000;
        control.g_pat = LINUX_PAT;
        control.rip = 0xFFFF_FFFF_8100_0000;
        control.rsp = 0xFFFF_C900_0000_3F00;
        control.rflags = 2;
        area.cpu.attach_efer = LINUX_EFER | msr::EFER_SVME;
        area.cpu.guest_efer = LINUX_EFER | msr::EFER_SVME;
        area.cpu.entered = 1;
        let msrs = BTreeMap::from([
            (msr::EFER, LINUX_EFER | msr::EFER_SVME),
            (msr::PAT, LINUX_PAT),
            (msr::VM_HSAVE_PA, 0x7000),
        ]);
        Self { area, hardware: Model { msrs, ..Model::default() }, _shared: shared }
    }

    /// VMRUN, which takes the event of the block.
    pub fn enter(&mut self) -> u64 {
        core::mem::take(&mut self.area.control.inject_event)
    }

    /// An exit with this code, as the world switch hands it over.
    pub fn exit(&mut self, exit_code: u64) -> crate::host::entry::Next {
        let control = &mut self.area.control;
        control.exit_code = exit_code;
        self.area.cpu.interrupted = crate::cpu::Interrupted {
            rip: control.rip,
            rax: control.rax,
            rdx: self.area.cpu.gate.outward.registers[2],
        };
        self.area.cpu.phase = crate::cpu::Phase::Exit;
        let next = crate::svm::exits::handle(&mut self.area, &mut self.hardware);
        crate::svm::machine_check::finish(&mut self.area, next)
    }

    /// A general register of the guest, in the order of the instruction encoding.
    pub fn register(&mut self, number: usize) -> &mut u64 {
        if number == 0 {
            &mut self.area.control.rax
        } else {
            &mut self.area.cpu.gate.outward.registers[number]
        }
    }
}
