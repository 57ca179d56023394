//! What passes between driver and hypervisor inside the kernel: the memory that the driver gives at
//! load, the per-CPU area with the gate's block, native operations, hypercalls and fault points.
//!
//! The hypervisor lives at the *direct-map address* of its own memory, so every `_virt` address here
//! is the same in the kernel's address space and in the hypervisor's.
//!
//! # The gate
//!
//! A page of the driver's text, mapped at its own address in the hypervisor's tables too. It has a
//! way in and a way out:
//!
//! * **in** (`mercury_svm_enter(area)`, C calling convention, interrupts off, EFER.SVME set by the
//!   caller): saves the callee-saved registers and RFLAGS on the stack; CLGI; stores RSP, the address
//!   of its return label, RFLAGS, CR3 and CR4 in [`GateBlock::inward`]; loads
//!   [`GateBlock::host_cr4`] and [`GateBlock::host_cr3`]; jumps to [`GateBlock::entry_virt`] with RDI
//!   = address of the area.
//! * **out** (the hypervisor jumps to [`GateBlock::leave_virt`] with RDI = address of the area):
//!   puts [`GateBlock::outward`] back into the processor, STGI, clears EFER.SVME (neither where KVM wants it
//!   otherwise: [`Outward::svm`]), and continues at the outward CS:RIP with the outward registers.
//!
//! That is AMD's gate. Intel's has no GIF: see [`NmiBlock`]. EFER.SVME is CR4.VMXE there, which the driver sets
//! and clears; the hypervisor executes VMXON and VMXOFF.
//!
//! A native operation that ends without entering the guest leaves the same way, to the return label,
//! with its result in RAX. A successful attach returns to the same label as the guest, RAX = 0.

use crate::facts::TableRegister;
use crate::shared::Registers;

/// Pages of one CPU's area: physically and virtually contiguous, aligned to its size.
pub const AREA_PAGES: usize = 8;
/// Bytes of one CPU's area.
pub const AREA_SIZE: usize = AREA_PAGES * 4096;
/// Page of the vendor's control block (VMCB, VMCS).
pub const AREA_PAGE_CONTROL: usize = 1;
/// Page of the hypervisor's own extended state (a VMCB for VMLOAD).
pub const AREA_PAGE_HOST: usize = 2;
/// Page that only the processor uses (VM_HSAVE_PA, VMXON region). Not mapped in the hypervisor's
/// tables: it is the guard beneath the stack.
pub const AREA_PAGE_PROCESSOR: usize = 4;
/// First page of the stack, which ends at the end of the area.
pub const AREA_PAGE_STACK: usize = 5;

/// Whose hardware virtualization a machine has. The driver chooses the hypervisor's entry point by it; above
/// that nothing depends on it.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// AMD: SVM.
    Amd = 0,
    /// Intel: VMX.
    Intel = 1,
}

/// Number of [`Vendor`]s.
pub const VENDORS: usize = 2;

/// "MERCHYPR" in ASCII, little-endian: start of the hypervisor's flat image.
pub const IMAGE_MAGIC: u64 = 0x5250_5948_4352_454d;

/// Start of the hypervisor's flat image. Offsets are in bytes from the image's start; text starts at
/// a page boundary, as do read-only data and data.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageHeader {
    /// [`IMAGE_MAGIC`].
    pub magic: u64,
    /// [`crate::MERCURY_ABI_VERSION`].
    pub abi_version: u32,
    /// 1 if built with fault points.
    pub fault_injection: u32,
    /// End of text (readable and executable), which starts at 0 with this header.
    pub text_end: u64,
    /// End of read-only data, which starts at `text_end`.
    pub rodata_end: u64,
    /// End of initialised data in the file.
    pub file_end: u64,
    /// End of the image in memory, zero-filled data included.
    pub memory_end: u64,
    /// Offset of the ELF64 Rela table; only R_X86_64_RELATIVE occurs.
    pub rela_offset: u64,
    /// Bytes of the Rela table.
    pub rela_size: u64,
    /// Offsets of the native entry points, by [`Vendor`]; 0: this image has nothing for that vendor.
    pub entry_offsets: [u64; VENDORS],
    /// Version, NUL-padded ASCII.
    pub version: [u8; 32],
}

/// Physically contiguous memory that belongs to the hypervisor: mapped in its tables, hidden in the
/// nested ones.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnedRange {
    /// First byte, host-physical, page-aligned.
    pub start_phys: u64,
    /// Length in 4 KiB pages.
    pub pages: u64,
}

/// What [`NativeOp::Init`] gets: everything that does not change until unload.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BootInfo {
    /// [`crate::MERCURY_ABI_VERSION`].
    pub abi_version: u32,
    /// 1 if the kernel runs with five-level paging.
    pub five_level: u32,
    /// Kernel virtual address of physical address 0 (the direct map's base).
    pub direct_map_virt: u64,
    /// Start of the image, virtual.
    pub image_virt: u64,
    /// Address of an array of [`OwnedRange`]: everything to hide.
    pub owned_virt: u64,
    /// Number of entries in it.
    pub owned_count: u64,
    /// Address of an array of host-physical addresses of zeroed pages for nested tables. They lie
    /// inside owned ranges. The driver may extend the array between two calls of [`NativeOp::Build`].
    pub pool_virt: u64,
    /// Number of entries in it.
    pub pool_count: u64,
    /// End of the highest address in use by RAM or devices, exclusive, host-physical: mapped eagerly.
    pub iomem_end_phys: u64,
}

/// A segment register as the driver read it from the live descriptor tables.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Selector.
    pub selector: u16,
    /// Zero.
    pub reserved: u16,
    /// As LAR returns it, shifted right by 8: type, S, DPL, P in bits 7:0; AVL, L, D/B, G in bits
    /// 15:12. Zero for a null selector.
    pub attributes: u32,
    /// Limit in bytes, as LSL returns it.
    pub limit: u32,
    /// Base address; 32 bits, as for every code or data segment that has one in a descriptor.
    pub base: u32,
}

/// What the driver and the gate's way in leave for the hypervisor.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inward {
    /// RSP at the return label.
    pub rsp: u64,
    /// The return label.
    pub rip: u64,
    /// RFLAGS at the return label.
    pub rflags: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// EFER as it was before SVME was set for the gate (AMD).
    pub efer: u64,
    /// VM_HSAVE_PA as it was before, restored at detach (AMD).
    pub vm_hsave_pa: u64,
    /// CS. Filled by the driver.
    pub cs: Segment,
    /// SS. Filled by the driver.
    pub ss: Segment,
    /// DS. Filled by the driver.
    pub ds: Segment,
    /// ES. Filled by the driver.
    pub es: Segment,
    /// FS, without its base. Filled by the driver on Intel.
    pub fs: Segment,
    /// GS, without its base. Filled by the driver on Intel.
    pub gs: Segment,
    /// LDTR, without its base. Filled by the driver on Intel.
    pub ldtr: Segment,
    /// TR, without its base. Filled by the driver on Intel.
    pub tr: Segment,
    /// Base of LDTR, virtual; 0 for a null selector.
    pub ldtr_base_virt: u64,
    /// Base of TR, virtual.
    pub tr_base_virt: u64,
    /// GDTR. Filled by the gate on Intel; on AMD the hypervisor reads it itself.
    pub gdtr: DescriptorTable,
    /// IDTR, likewise.
    pub idtr: DescriptorTable,
}

/// What the gate's way out puts back.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outward {
    /// CR0.
    pub cr0: u64,
    /// CR2.
    pub cr2: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// DR6.
    pub dr6: u64,
    /// DR7.
    pub dr7: u64,
    /// GDTR, as LGDT takes it: limit in the two bytes before the address.
    pub gdtr: DescriptorTable,
    /// IDTR, as LIDT takes it.
    pub idtr: DescriptorTable,
    /// IA32_DEBUGCTL that only the gate can load (Intel): one that has branches stored, through the page tables in
    /// use. 0: none.
    pub debugctl: u64,
    /// Selectors ES, CS, SS, DS.
    pub selectors: [u64; 4],
    /// RIP.
    pub rip: u64,
    /// RFLAGS.
    pub rflags: u64,
    /// General registers; entry 4 is RSP.
    pub registers: Registers,
    /// Selectors FS and GS (Intel; on AMD they are back before the gate).
    pub thread_selectors: [u64; 2],
    /// Bases of FS and GS (Intel), virtual.
    pub thread_bases: [u64; 2],
    /// EFER that only the gate can load (Intel): one without NXE, which the hypervisor's tables need. 0: none.
    pub efer: u64,
    /// What the gate leaves in SVM (AMD): [`KEEP_SVME`], [`KEEP_GIF_CLEAR`].
    pub svm: u64,
}

/// [`Outward::svm`]: EFER.SVME stays set, for KVM has set it.
pub const KEEP_SVME: u64 = 1 << 0;
/// [`Outward::svm`]: GIF stays 0, for KVM has cleared it.
pub const KEEP_GIF_CLEAR: u64 = 1 << 1;

/// A pseudo-descriptor: LGDT and LIDT take the address of `limit`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DescriptorTable {
    /// Zero.
    pub padding: [u16; 3],
    /// Limit.
    pub limit: u16,
    /// Linear address.
    pub base_virt: u64,
}

impl DescriptorTable {
    /// The pseudo-descriptor of a table register.
    #[must_use]
    pub const fn new(register: TableRegister) -> Self {
        Self { padding: [0; 3], limit: register.limit as u16, base_virt: register.base_virt }
    }
}

/// First bytes of a CPU's area. The hypervisor's private per-CPU data follows at
/// [`GATE_PRIVATE_OFFSET`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GateBlock {
    /// CR3 of the hypervisor's tables. Filled at load.
    pub host_cr3: u64,
    /// CR4 in the hypervisor, from a white list: PAE, MCE, OSFXSR, OSXMMEXCPT, and LA57 if the kernel
    /// has it, VMXE on Intel. Filled at load.
    pub host_cr4: u64,
    /// Native entry point, virtual. Filled at load.
    pub entry_virt: u64,
    /// The gate's way out, virtual. Filled at load.
    pub leave_virt: u64,
    /// Host-physical address of this area. Filled at load.
    pub area_phys: u64,
    /// Virtual address of this CPU's [`crate::shared::SharedCpu`]. Filled at load.
    pub shared_virt: u64,
    /// A virtual page of the hypervisor's that shows a guest's control block of KVM's, read-only. Filled at load.
    pub window_virt: u64,
    /// Virtual address of the page-table entry behind it. Filled at load.
    pub window_entry_virt: u64,
    /// Linux's CPU number. Filled at load.
    pub cpu: u32,
    /// [`NativeOp`] to perform. Filled by the driver before each call.
    pub operation: u32,
    /// Its argument: a virtual address or 0.
    pub argument: u64,
    /// Out: what the result code refers to.
    pub detail: [u64; 2],
    /// Armed fault point of this CPU (fault-injection builds).
    pub fault: FaultArm,
    /// Fault points that have fired on this CPU since load (fault-injection builds).
    pub fault_fired: u64,
    /// Way in.
    pub inward: Inward,
    /// Way out.
    pub outward: Outward,
    /// The gate's own: RIP, CS, RFLAGS, RSP, SS for the IRETQ of a way out to user mode.
    pub frame: [u64; 5],
    /// Not 0: a machine check struck in the hypervisor and the system above has yet to get it. The gate
    /// raises it on the way out.
    pub machine_check: u64,
    /// How an NMI finds its way where the processor cannot hold it back (Intel).
    pub nmi: NmiBlock,
}

/// NMIs on a processor without a global interrupt flag.
///
/// One that strikes between the gate's first instruction and its last, or in the hypervisor, comes to the
/// driver's handler in the gate page ([`NmiBlock::handler_virt`]), on whatever stack of the area is in use.
/// The handler notes it in [`NmiBlock::pending`] and returns without IRET, so that NMIs stay blocked, as they
/// would be in the handler of the system above: a second one waits in the processor. The next entry into the
/// guest injects the NMI; the gate's way out raises it with INT 2 when the system's tables are back.
///
/// If it strikes between the last look at `pending` and the entry (`window_start_virt` up to
/// `window_end_virt`), the handler returns to `restart_virt`, which looks again.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NmiBlock {
    /// How many NMIs are to be delivered.
    pub pending: u64,
    /// The handler, virtual; 0: this processor needs none. Filled at load.
    pub handler_virt: u64,
    /// Start of the window, virtual. Filled by the hypervisor.
    pub window_start_virt: u64,
    /// End of the window, virtual.
    pub window_end_virt: u64,
    /// Where to begin again, virtual.
    pub restart_virt: u64,
    /// The GDT of the passage: null, unused, code, data at the kernel's selectors. Filled at load.
    pub gdt: [u64; 4],
    /// The IDT of the passage: vectors 0 to 2, of which only NMI is present. Filled at load.
    pub idt: [u64; 6],
    /// Its GDTR. Filled at load.
    pub gdtr: DescriptorTable,
    /// Its IDTR. Filled at load.
    pub idtr: DescriptorTable,
}

/// Where the hypervisor's private data starts in the gate page.
pub const GATE_PRIVATE_OFFSET: usize = 1024;

const _: () = assert!(size_of::<GateBlock>() <= GATE_PRIVATE_OFFSET);
const _: () = assert!(AREA_SIZE.is_power_of_two());

/// Operations of the hypervisor on a native CPU, through the gate.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NativeOp {
    /// Takes over the boot information; argument: address of a [`BootInfo`]. Once per load.
    Init = 1,
    /// Builds part of the nested tables (a bounded piece of work): `More`, `NeedPages` or `Ok`.
    Build = 2,
    /// Runs the preflight checks; argument: address of a [`crate::facts::CpuFacts`] inside mapped
    /// memory.
    Preflight = 3,
    /// Attaches this CPU. Returns as the guest.
    Attach = 4,
}

/// "MERC" in ASCII: RCX of every hypercall.
pub const HYPERCALL_MAGIC: u64 = 0x4352_454d;

/// Set in what RDMSR of EFER answers on an attached AMD CPU if RSI holds [`HYPERCALL_MAGIC`]: so a CPU is asked for its
/// mode without an exception. The processor's own EFER never has it.
pub const EFER_ATTACHED: u64 = 1 << 63;

/// Hypercalls of the driver: number in RAX, [`HYPERCALL_MAGIC`] in RCX, arguments in RDI and RSI;
/// result code in RAX, value in RDX. Other registers are preserved. From user mode, with another RCX
/// or on a native CPU the instruction is #UD.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hypercall {
    /// Answers with [`crate::MERCURY_ABI_VERSION`] in RDX: the CPU is attached.
    Ping = 0,
    /// Detaches this CPU; returns natively.
    Detach = 1,
    /// Flushes this CPU's translations of the nested tables.
    Flush = 2,
    /// Arms fault point RDI on this CPU for passage RSI (fault-injection builds).
    ArmFault = 3,
    /// Does what [`crate::snapshot::SnapshotCall`] RDI says, with an argument at RSI.
    Snapshot = 4,
}

/// Where a fault can be injected (fault-injection builds only). A point fires once per arming.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultPoint {
    /// None: disarm.
    None = 0,

    // Driver
    /// Load: the contiguous allocation fails.
    LoadContiguous = 1,
    /// Load: a later allocation fails.
    LoadMemory = 2,
    /// Load: the image's header is damaged.
    LoadImage = 3,
    /// Attach, all CPUs: facts of the CPU are altered at [`FaultArm::offset`] to [`FaultArm::value`].
    Facts = 4,
    /// Attach: refused just before EFER.SVME (Intel: CR4.VMXE) is set.
    BeforeSvme = 5,
    /// Attach: refused just after EFER.SVME (Intel: CR4.VMXE) is set.
    AfterSvme = 6,
    /// Attach: the CPU reports the wrong mode after the switch.
    AfterSwitch = 7,
    /// Attach: refused by the hotplug callback of a CPU that comes online.
    Hotplug = 8,
    /// Removal of the driver by force: no CPU is detached.
    Exit = 9,

    // Hypervisor, on the way in
    /// Refuse at entry.
    Entry = 32,
    /// Refuse after the extended state was saved.
    AfterSave = 33,
    /// Refuse after the control block was filled.
    AfterCapture = 34,
    /// Refuse just before the guest is entered.
    BeforeRun = 35,
    /// #PF in the hypervisor on the way in.
    EntryPageFault = 36,
    /// Panic on the way in.
    EntryPanic = 37,
    /// Control block with address-space identifier (Intel: VPID) 0.
    RunAsidZero = 38,
    /// Control block without the VMRUN intercept (Intel: without a pin-based control that must be 1).
    RunNoIntercept = 39,
    /// Guest CR0 with bit 32 set.
    RunCr0 = 40,
    /// Guest CR4 with a reserved bit set.
    RunCr4 = 41,
    /// Guest EFER without SVME (Intel: without LMA in long mode).
    RunEfer = 42,
    /// Guest CR3 with a reserved bit set.
    RunCr3 = 43,
    /// Guest DR7 with bit 32 set.
    RunDr7 = 44,
    /// Any word of the control block, spoilt by an exclusive or with [`FaultArm::value`]: [`FaultArm::offset`]
    /// names it in its low half (AMD: byte offset of an aligned 64-bit word; Intel: encoding of the field),
    /// and in its high half how far the value is shifted to the left.
    RunField = 45,

    // Hypervisor, in an exit
    /// #PF in the exit handler.
    ExitPageFault = 64,
    /// #GP in the exit handler.
    ExitGeneralProtection = 65,
    /// #UD in the exit handler.
    ExitInvalidOpcode = 66,
    /// Stack overflow in the exit handler (#DF by way of the guard page).
    ExitStackOverflow = 67,
    /// Panic in the exit handler.
    ExitPanic = 68,
    /// The exit is taken for one that nobody knows.
    ExitUnknown = 69,
    /// The control block is corrupted before the guest is resumed.
    ExitCorruptControl = 70,
    /// The guest state in the control block is corrupted before the guest is resumed.
    ExitCorruptState = 71,
    /// #PF while detaching.
    DetachPageFault = 72,
    /// Panic while detaching.
    DetachPanic = 73,
    /// A spurious event is reported as being in delivery at the exit.
    ExitEvent = 74,
    /// #PF in the answer to the driver's own hypercalls, which saves no vector register.
    QuickPageFault = 75,
}

/// Arming of a fault point, kept by the driver and handed to the hypervisor in its area.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultArm {
    /// [`FaultPoint`] as a number.
    pub point: u32,
    /// Fires at this passage, counting down to 0.
    pub passage: u32,
    /// For [`FaultPoint::Facts`]: byte offset of an aligned 32-bit word in [`crate::facts::CpuFacts`]. For
    /// [`FaultPoint::RunField`]: what is described there.
    pub offset: u32,
    /// For [`FaultPoint::Facts`]: its new value. For [`FaultPoint::RunField`]: the bits to be flipped.
    pub value: u32,
}
