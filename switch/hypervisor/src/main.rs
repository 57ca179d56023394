//! Mercury's hypervisor: the freestanding image.
//!
//! It promises the system above:
//!
//! 1. **Attach** puts this code beneath one CPU at a time, in a few hundred instructions with interrupts
//!    off. Nothing is recomputed, and no CPU waits for another. The system goes on at the instruction after
//!    the call, as a guest.
//! 2. **Attached**, the system keeps its devices, its interrupts and its memory, at the same addresses.
//!    Nothing that it does in steady state exits.
//! 3. **Detach** gives the processor back exactly as the system has it. So does any exit that this code
//!    does not know, and any failure of its own: the default is to let go.
//!
//! The way in is [`mercury_hypervisor::host::entry`]. The world switch is `run` in the vendor's folder.
//! Exits are answered by `exits` there, and by [`mercury_hypervisor::exit`].

#![no_std]
#![no_main]

use mercury_abi::MERCURY_ABI_VERSION;
use mercury_abi::gate::{IMAGE_MAGIC, VENDORS};

mod memory;

/// First words of the image. `link.ld` adds the offsets (see [`mercury_abi::gate::ImageHeader`]).
#[repr(C)]
struct Identity {
    magic: u64,
    abi_version: u32,
    fault_injection: u32,
}

#[used]
#[unsafe(link_section = ".header.identity")]
static IDENTITY: Identity = Identity {
    magic: IMAGE_MAGIC,
    abi_version: MERCURY_ABI_VERSION,
    fault_injection: cfg!(feature = "fault-injection") as u32,
};

#[used]
#[unsafe(link_section = ".header.version")]
static VERSION: [u8; 32] = padded(env!("CARGO_PKG_VERSION"));

const fn padded(text: &str) -> [u8; 32] {
    let mut bytes = [0; 32];
    let mut index = 0;
    while index < text.len() && index < bytes.len() {
        bytes[index] = text.as_bytes()[index];
        index += 1;
    }
    bytes
}

#[used]
static ENTRIES: [extern "C" fn() -> !; VENDORS] =
    [mercury_hypervisor::svm::run::mercury_entry_svm, mercury_hypervisor::vmx::run::mercury_entry_vmx];

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: the hypervisor runs on no other stacks than those of an area, and whatever used the area
    // will not run again.
    unsafe { mercury_hypervisor::emergency::after_panic(info) }
}

/// Satisfies the precompiled core library, which names it. Nothing ever unwinds.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}
