//! A read of a physical address from user mode, through the test module's mapping. Where the nested
//! tables do not map the address yet, the read exits in the midst of a user's program. The
//! program's registers must not change, whatever the hypervisor does at the exit.

use std::{
    arch::asm,
    fs::{File, OpenOptions},
    os::fd::AsRawFd,
    ptr,
};

use crate::{Result, cpus, report::Report};

const PATH: &str = "/dev/mercury_test";
const PAGE: usize = 4096;

/// The address, and the CPU that reads it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Read from this CPU
    #[arg(long)]
    on: usize,
    /// Physical address, a multiple of 4096, in hexadecimal
    #[arg(value_parser = |text: &str| u64::from_str_radix(text, 16))]
    at: u64,
}

/// Reads the address once.
pub fn run(args: &Args, report: &mut Report) -> Result<()> {
    cpus::pin(args.on)?;
    let module = OpenOptions::new().read(true).write(true).open(PATH)?;
    let page = map(&module, args.at)?;
    let before: [u64; 4] = [0x1111_2222_3333_4444, u64::MAX, 1 << 63, 0x0123_4567_89AB_CDEF];
    let [mut rax, mut rcx, mut rdx, mut r8] = before;
    let (mut stack_before, mut stack_after) = (0_u64, 0_u64);
    // SAFETY: the page is mapped for reading, and no Rust object is there.
    unsafe {
        asm!(
            "mov r10, rsp",
            "mov r9, [r9]",
            "mov r11, rsp",
            inout("rax") rax, inout("rcx") rcx, inout("rdx") rdx, inout("r8") r8,
            inout("r9") page => _, inout("r10") stack_before, inout("r11") stack_after,
        );
    }
    report.check([rax, rcx, rdx, r8] == before, || format!("registers became {:x?}", [rax, rcx, rdx, r8]));
    report.check(stack_before == stack_after, || format!("RSP became {stack_after:#x}"));
    report.pass();
    Ok(())
}

fn map(module: &File, phys: u64) -> Result<*const u64> {
    let offset = i64::try_from(phys)?;
    // SAFETY: a new mapping, of one page, at an address of the kernel's choice.
    let page = unsafe {
        libc::mmap(ptr::null_mut(), PAGE, libc::PROT_READ, libc::MAP_SHARED, module.as_raw_fd(), offset)
    };
    if page == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(page.cast())
}
