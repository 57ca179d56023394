//! CPUID as the last instruction below 4 GiB, in 32-bit code. The next instruction is at 0, where
//! nothing is mapped. A hypervisor that steps over CPUID must step to 0 too.

use std::{arch::asm, ptr};

use crate::{Result, cpus, report::Report, stop::Stop};

const PAGE: usize = 4096;
const LAST_PAGE: usize = 0xFFFF_F000;
const CPUID: [u8; 2] = [0x0F, 0xA2];
/// Linux's selector of 32-bit user code.
const USER32_CS: u16 = 0x23;

/// Runs on each CPU, in a process of its own that is expected to fault.
pub fn run(stop: &Stop, report: &mut Report) -> Result<()> {
    map()?;
    cpus::on_each(stop, report, |cpu, stop, report| {
        while !stop.is_set() {
            let signal = of_child()?;
            report.check(signal == Some(libc::SIGSEGV), || format!("CPU {cpu}: ended by {signal:?}"));
            report.pass();
        }
        Ok(())
    })
}

/// Maps the instruction at the end of its page.
fn map() -> Result<()> {
    let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let wanted = ptr::with_exposed_provenance_mut(LAST_PAGE);
    // SAFETY: a new mapping, where none may be.
    let page = unsafe { libc::mmap(wanted, PAGE, protection, flags, -1, 0) };
    if page != wanted {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: the last two bytes of that page.
    unsafe { page.cast::<[u8; 2]>().byte_add(PAGE - CPUID.len()).write(CPUID) };
    Ok(())
}

/// Returns the signal that ended a process which has jumped there.
fn of_child() -> Result<Option<i32>> {
    // SAFETY: the child calls nothing but the jump.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error().into()),
        0 => jump(),
        child => {
            let mut status = 0;
            // SAFETY: waits for that child.
            cpus::check(unsafe { libc::waitpid(child, &raw mut status, 0) })?;
            Ok(libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status)))
        }
    }
}

/// Jumps into 32-bit code, from which there is no way back.
fn jump() -> ! {
    #[repr(C, packed)]
    struct Far(u32, u16);
    let target = Far((LAST_PAGE + PAGE - CPUID.len()) as u32, USER32_CS);
    // SAFETY: the process ends there.
    unsafe {
        asm!(
            "xor eax, eax",
            "xor ecx, ecx",
            "jmp fword ptr [{}]",
            in(reg) &raw const target,
            options(noreturn),
        );
    }
}
