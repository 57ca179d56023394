//! A processor and an area for tests on the host.

use std::collections::BTreeMap;

use mercury_abi::shared::SharedCpu;

use crate::host::entry::Next;
use crate::pci::Register;
use crate::svm::Area;
use crate::svm::vmcb::{INTERCEPT_MISC1, INTERCEPT_MISC2};
use crate::x86::{Hardware, RFLAGS_IF, RFLAGS_TF, msr};

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
    /// Fields of the current VMCS; what is not in it reads 0.
    pub fields: BTreeMap<u32, u64>,
    /// CPUID by leaf; every subleaf is the same.
    pub leaves: BTreeMap<u32, [u32; 4]>,
    /// True in VMX operation.
    pub vmx_on: bool,
    /// True if VMXON and VMPTRLD are to fail.
    pub vmxon_fails: bool,
    /// The VM-instruction error of loading a VMCS.
    pub vmcs_error: Option<u64>,
    /// True while the system's memory is mapped.
    pub mapped: bool,
    /// The barriers with which predictions were forgotten last.
    pub forgotten: Option<u32>,
    /// Value of `forgotten` at each mapping of memory.
    pub mappings: Vec<Option<u32>>,
    /// Flushes of all guests' translations.
    pub flushes: u32,
    /// XCR0, if it was written.
    pub xcr0: Option<u64>,
    /// Caches were written back.
    pub written_back: u32,
    /// True once the processor has shut down.
    pub shut_down: bool,
    /// NMIs that were taken with GIF open for a moment.
    pub nmis_taken: u32,
    /// TSC value that was read last.
    pub tsc: u64,
    /// Local APICs that were sent an NMI.
    pub nmis: Vec<u32>,
    /// Registers of PCI functions by their address. Others read as all ones.
    pub pci: BTreeMap<u32, u32>,
}

impl Hardware for Model {
    fn read_msr(&mut self, index: u32) -> Option<u64> {
        self.msrs.get(&index).copied()
    }

    fn read_msrs<const N: usize>(&mut self, indices: [u32; N]) -> Option<[u64; N]> {
        let values = indices.map(|index| self.read_msr(index));
        values.iter().all(Option::is_some).then(|| values.map(Option::unwrap_or_default))
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

    fn own_tables(&mut self) -> u64 {
        if self.mapped { crate::snapshot::tests::WIDE } else { 0x77_7000 }
    }

    fn load_own_tables(&mut self, root_phys: u64) {
        self.mapped = root_phys == crate::snapshot::tests::WIDE;
        self.mappings.extend(self.mapped.then_some(self.forgotten));
    }

    fn forget_predictions(&mut self, barriers: u32) {
        assert!(!self.mapped, "too late");
        self.forgotten = Some(barriers);
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

    fn cpuid(&mut self, leaf: u32, _: u32) -> [u32; 4] {
        self.leaves.get(&leaf).copied().unwrap_or_default()
    }

    /// Executes XSETBV: x87 must be on, and no component above bit 2 exists.
    fn xsetbv(&mut self, index: u32, value: u64) -> bool {
        let legal = index == 0 && value & 1 == 1 && value >> 3 == 0;
        self.xcr0 = legal.then_some(value).or(self.xcr0);
        legal
    }

    fn write_back_caches(&mut self) {
        self.written_back += 1;
    }

    fn vmxon(&mut self, _: u64) -> bool {
        self.vmx_on = !self.vmxon_fails;
        self.vmx_on
    }

    fn vmcs_load(&mut self, _: u64) -> Result<(), u64> {
        assert!(self.vmx_on, "VMPTRLD outside of VMX operation");
        self.vmcs_error.map_or(Ok(()), Err)
    }

    fn vmxoff(&mut self, _: u64) {
        assert!(self.vmx_on, "VMXOFF outside of VMX operation");
        self.vmx_on = false;
    }

    fn vmread(&mut self, field: u32) -> u64 {
        assert!(self.vmx_on, "VMREAD outside of VMX operation");
        self.fields.get(&field).copied().unwrap_or(0)
    }

    fn vmwrite(&mut self, field: u32, value: u64) {
        assert!(self.vmx_on, "VMWRITE outside of VMX operation");
        assert!(field >> 10 & 3 != 1, "VMWRITE of {field:#x}, which is read-only");
        self.fields.insert(field, value);
    }

    fn flush_guests(&mut self, _: bool) {
        assert!(self.vmx_on, "INVEPT outside of VMX operation");
        self.flushes += 1;
    }

    fn shut_down(&mut self) -> Next {
        self.shut_down = true;
        Next::Leave
    }

    fn take_nmi(&mut self) {
        self.nmis_taken += 1;
    }

    fn flush_by_entry(&mut self, control: &mut crate::svm::vmcb::Vmcb, _: u64) {
        assert_eq!(control.nested_cr3, crate::nested::empty_root().as_u64(), "nothing may be fetched");
        assert_eq!(control.rflags & (RFLAGS_IF | RFLAGS_TF), 0);
        assert_eq!(control.tlb_control, crate::svm::vmcb::TLB_FLUSH_ALL);
        (control.exit_code, control.exit_info1) = (crate::svm::vmcb::exit_code::NPF, 1 << 4);
        self.flushes += 1;
    }

    fn forget_page(&mut self, _: u64) {}

    fn send_nmi(&mut self, apic_id: u32) {
        self.nmis.push(apic_id);
    }

    fn read_pci(&mut self, register: Register) -> u32 {
        self.pci.get(&register.address()).copied().unwrap_or(u32::MAX)
    }

    fn write_pci(&mut self, register: Register, value: u32) {
        self.pci.insert(register.address(), value);
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
        control.asid = 15;
        control.nested_control = 1;
        control.efer = LINUX_EFER | msr::EFER_SVME;
        control.cr0 = 0x8005_0033;
        control.cr4 = 0x6F0;
        control.cr3 = 0x1234_5000;
        control.g_pat = LINUX_PAT;
        control.rip = 0xFFFF_FFFF_8100_0000;
        control.rsp = 0xFFFF_C900_0000_3F00;
        control.rflags = 2;
        area.own.attach_efer = LINUX_EFER | msr::EFER_SVME;
        area.own.guest_efer = LINUX_EFER;
        area.own.asids = [15, 14];
        area.own.block_phys = crate::svm::guests::NO_BLOCK;
        area.cpu.entered = 1;
        let msrs = BTreeMap::from([
            (msr::EFER, LINUX_EFER | msr::EFER_SVME),
            (msr::PAT, LINUX_PAT),
            (msr::VM_HSAVE_PA, 0x7000),
        ]);
        Self { area, hardware: Model { msrs, ..Model::default() }, _shared: shared }
    }

    /// Executes VMRUN, which takes the event of the block.
    pub fn enter(&mut self) -> u64 {
        core::mem::take(&mut self.area.control.inject_event)
    }

    /// Makes an exit with this code, as the world switch hands it over.
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
        crate::machine_check::finish(&mut self.area, &mut self.hardware, next)
    }

    /// Returns a general register of the guest, in the order of the instruction encoding.
    pub fn register(&mut self, number: usize) -> &mut u64 {
        if number == 0 {
            &mut self.area.control.rax
        } else {
            &mut self.area.cpu.gate.outward.registers[number]
        }
    }
}
