//! Entry points in assembler: the way in from the gate, the way out to it, and exceptions.
//!
//! There is no IRET here: it would unblock NMIs that the system above has blocked (HARDWARE A-35).

#[cfg(feature = "image")]
use core::arch::naked_asm;
#[cfg(feature = "image")]
use core::mem::offset_of;

#[cfg(feature = "image")]
use mercury_abi::gate::{AREA_SIZE, GateBlock};

#[cfg(feature = "image")]
use crate::cpu::Cpu;

/// Bytes from one exception stub to the next.
pub const EXCEPTION_STUB_SIZE: u64 = 16;

/// Operand of VERW: the selector of a writable segment.
#[cfg(feature = "image")]
pub static VERW_SELECTOR: u16 = super::tables::HOST_DS;

/// MXCSR in the hypervisor: every exception masked, round to nearest.
#[cfg(feature = "image")]
static HOST_MXCSR: u32 = 0x1F80;

/// Step that follows an operation or an exit.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Leave through the gate with what [`mercury_abi::gate::Outward`] holds.
    Leave = 0,
    /// Enter the guest by the world switch.
    Run = 1,
}

/// The native entry of one vendor: the gate jumps here on the hypervisor's tables, RDI = the CPU's area.
///
/// Takes its own stack, saves what the compiled code may change, loads the hypervisor's tables. `$native`
/// is the vendor's [`crate::native::enter`], `$run` its way into the guest.
#[cfg(feature = "image")]
macro_rules! native_entry_point {
    ($name:ident, $vendor:ty, $native:path, $run:path) => {
        #[doc = "The native entry: see [`crate::host::entry`]."]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> ! {
            core::arch::naked_asm!(
                "lea rsp, [rdi + {area_size}]",
                "mov rbx, rdi",
                "mov rax, cr0",
                "mov [rdi + {guest_cr0}], rax",
                "mov eax, {host_cr0}",
                "mov cr0, rax",
                "call {save_sse}",
                "sgdt [rdi + {guest_gdtr} + 6]",
                "sidt [rdi + {guest_idtr} + 6]",
                "cld",
                "cmp dword ptr [rdi + {prepared}], 0",
                "jne 2f",
                "call {prepare}",
                "2: lgdt [rbx + {host_gdtr} + 6]",
                "lidt [rbx + {host_idtr} + 6]",
                "mov eax, {host_ds}",
                "mov ss, eax",
                "mov ds, eax",
                "mov es, eax",
                "push {host_cs}",
                "lea rax, [rip + 3f]",
                "push rax",
                "retfq",
                "3: mov rdi, rbx",
                "call {native}",
                "mov rdi, rbx",
                "test eax, eax",
                "jz {leave}",
                "jmp {run}",
                area_size = const mercury_abi::gate::AREA_SIZE,
                guest_cr0 = const core::mem::offset_of!($crate::cpu::Cpu, guest_cr0),
                host_cr0 = const $crate::x86::HOST_CR0,
                save_sse = sym $crate::host::entry::save_sse,
                guest_gdtr = const core::mem::offset_of!($crate::cpu::Cpu, guest_gdtr),
                guest_idtr = const core::mem::offset_of!($crate::cpu::Cpu, guest_idtr),
                prepared = const core::mem::offset_of!($crate::cpu::Cpu, prepared),
                prepare = sym $crate::host::entry::prepare_area::<$vendor>,
                host_gdtr = const core::mem::offset_of!($crate::cpu::Cpu, host_gdtr),
                host_idtr = const core::mem::offset_of!($crate::cpu::Cpu, host_idtr),
                host_ds = const $crate::host::tables::HOST_DS,
                host_cs = const $crate::host::tables::HOST_CS,
                native = sym $native,
                leave = sym $crate::host::entry::leave,
                run = sym $run,
            )
        }
    };
}

#[cfg(feature = "image")]
pub(crate) use native_entry_point;

/// Fills an area before its first use.
///
/// # Safety
/// `area` is this CPU's own, zeroed but for its gate block.
#[cfg(feature = "image")]
pub unsafe extern "C" fn prepare_area<V: crate::vendor::Vendor>(area: *mut crate::cpu::Area<V>) {
    // SAFETY: the gate passes this CPU's area, which the driver zeroed and mapped.
    super::tables::prepare(unsafe { &mut *area });
}

/// Leaves for good, RDI = the CPU's area. The extended state is the system's already. SSE is restored here,
/// and the gate restores the rest.
#[cfg(feature = "image")]
#[unsafe(naked)]
pub extern "C" fn leave() -> ! {
    naked_asm!(
        "lea rsp, [rdi + {area_size}]",
        "call {restore_sse}",
        "jmp {quickly}",
        area_size = const AREA_SIZE,
        restore_sse = sym restore_sse,
        quickly = sym leave_quickly,
    )
}

/// Leaves for good, RDI = the CPU's area, where the vector registers are still the system's.
#[cfg(feature = "image")]
#[unsafe(naked)]
pub extern "C" fn leave_quickly() -> ! {
    naked_asm!(
        "jmp qword ptr [rdi + {leave_virt}]",
        leave_virt = const offset_of!(Cpu, gate) + offset_of!(GateBlock, leave_virt),
    )
}

#[cfg(feature = "image")]
macro_rules! each_xmm {
    ($($instruction:literal)*) => {
        concat!($($instruction, "\n",)*)
    };
}

/// Saves XMM0–15 and MXCSR in the area at RDI, sets [`Cpu::sse_saved`], and loads the hypervisor's MXCSR.
/// Changes no other register. An exception on the way finds the saving either undone, and begins it again,
/// or done.
#[cfg(feature = "image")]
#[unsafe(naked)]
pub extern "C" fn save_sse() {
    naked_asm!(
        "stmxcsr [rdi + {mxcsr}]",
        each_xmm!("movaps [rdi + {xmm}], xmm0" "movaps [rdi + {xmm} + 16], xmm1"
            "movaps [rdi + {xmm} + 32], xmm2" "movaps [rdi + {xmm} + 48], xmm3"
            "movaps [rdi + {xmm} + 64], xmm4" "movaps [rdi + {xmm} + 80], xmm5"
            "movaps [rdi + {xmm} + 96], xmm6" "movaps [rdi + {xmm} + 112], xmm7"
            "movaps [rdi + {xmm} + 128], xmm8" "movaps [rdi + {xmm} + 144], xmm9"
            "movaps [rdi + {xmm} + 160], xmm10" "movaps [rdi + {xmm} + 176], xmm11"
            "movaps [rdi + {xmm} + 192], xmm12" "movaps [rdi + {xmm} + 208], xmm13"
            "movaps [rdi + {xmm} + 224], xmm14" "movaps [rdi + {xmm} + 240], xmm15"),
        "mov dword ptr [rdi + {saved}], 1",
        "ldmxcsr [rip + {host_mxcsr}]",
        "ret",
        mxcsr = const offset_of!(Cpu, mxcsr),
        xmm = const offset_of!(Cpu, xmm),
        saved = const offset_of!(Cpu, sse_saved),
        host_mxcsr = sym HOST_MXCSR,
    )
}

/// Reverses [`save_sse`]: the registers are the system's again.
#[cfg(feature = "image")]
#[unsafe(naked)]
pub extern "C" fn restore_sse() {
    naked_asm!(
        each_xmm!("movaps xmm0, [rdi + {xmm}]" "movaps xmm1, [rdi + {xmm} + 16]"
            "movaps xmm2, [rdi + {xmm} + 32]" "movaps xmm3, [rdi + {xmm} + 48]"
            "movaps xmm4, [rdi + {xmm} + 64]" "movaps xmm5, [rdi + {xmm} + 80]"
            "movaps xmm6, [rdi + {xmm} + 96]" "movaps xmm7, [rdi + {xmm} + 112]"
            "movaps xmm8, [rdi + {xmm} + 128]" "movaps xmm9, [rdi + {xmm} + 144]"
            "movaps xmm10, [rdi + {xmm} + 160]" "movaps xmm11, [rdi + {xmm} + 176]"
            "movaps xmm12, [rdi + {xmm} + 192]" "movaps xmm13, [rdi + {xmm} + 208]"
            "movaps xmm14, [rdi + {xmm} + 224]" "movaps xmm15, [rdi + {xmm} + 240]"),
        "ldmxcsr [rdi + {mxcsr}]",
        "mov dword ptr [rdi + {saved}], 0",
        "ret",
        mxcsr = const offset_of!(Cpu, mxcsr),
        xmm = const offset_of!(Cpu, xmm),
        saved = const offset_of!(Cpu, sse_saved),
    )
}

/// Returns the virtual address of the first exception stub.
#[cfg(feature = "image")]
pub fn exception_stubs_virt() -> u64 {
    exception_stubs as *const () as u64
}

/// Returns 0: tests have no exception stubs.
#[cfg(not(feature = "image"))]
pub fn exception_stubs_virt() -> u64 {
    0
}

/// Begins each exception: one stub a vector, [`EXCEPTION_STUB_SIZE`] bytes apart. A stub pushes an error
/// code where the processor pushes none (APM vol. 2, 8.2), and then the vector.
#[cfg(feature = "image")]
#[unsafe(naked)]
extern "C" fn exception_stubs() {
    naked_asm!(
        ".set vector, 0",
        ".rept 32",
        ".balign {stub}",
        ".if ({with_error_code} >> vector) & 1 == 0",
        "push 0",
        ".endif",
        "push vector",
        ".byte 0xE9",
        ".long {common} - . - 4",
        ".set vector, vector + 1",
        ".endr",
        stub = const EXCEPTION_STUB_SIZE,
        with_error_code = const 0x6022_7D00u32,
        common = sym exception_common,
    )
}

/// Saves the registers of any exception in a [`super::exceptions::Frame`]. Then it goes on at the recovery
/// address on the interrupted stack, or to the emergency path on the main stack.
///
/// The interrupted stack is entered below its red zone, by POPF and RET.
///
/// The vector registers are the system's where the quick answer or the world switch was interrupted.
/// `recover` uses none, because the code that goes on may have them live (`lab/tests/image.rs`). The
/// emergency path may use any, and ends in [`restore_sse`].
#[cfg(feature = "image")]
#[unsafe(naked)]
extern "C" fn exception_common() {
    naked_asm!(
        "push rax; push rcx; push rdx; push rbx; push rbp; push rsi; push rdi",
        "push r8; push r9; push r10; push r11; push r12; push r13; push r14; push r15",
        "cld",
        "mov rdi, rsp",
        "call {recover}",
        "test rax, rax",
        "jz 2f",
        "mov rcx, [rsp + {rsp_slot}]",
        "sub rcx, 144",
        "mov [rcx + 8], rax",
        "mov rax, [rsp + {rflags_slot}]",
        "mov [rcx], rax",
        "mov [rsp + {rsp_slot}], rcx",
        "pop r15; pop r14; pop r13; pop r12; pop r11; pop r10; pop r9; pop r8",
        "pop rdi; pop rsi; pop rbp; pop rbx; pop rdx; pop rcx; pop rax",
        "mov rsp, [rsp + {rsp_slot} - 120]",
        "popfq",
        "ret 128",
        "2: mov rsi, rsp",
        "mov rdi, rsp",
        "and rdi, -{area_size}",
        "lea rsp, [rdi + {area_size}]",
        "cmp dword ptr [rdi + {sse_saved}], 0",
        "jne 3f",
        "call {save_sse}",
        "3: call {fatal}",
        "ud2",
        recover = sym super::exceptions::recover,
        fatal = sym super::exceptions::fatal,
        sse_saved = const offset_of!(Cpu, sse_saved),
        save_sse = sym save_sse,
        rsp_slot = const offset_of!(super::exceptions::Frame, rsp),
        rflags_slot = const offset_of!(super::exceptions::Frame, rflags),
        area_size = const AREA_SIZE,
    )
}
