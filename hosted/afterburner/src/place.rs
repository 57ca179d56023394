//! The files of a kernel that get slots, by the place of the build's output.
//!
//! - Code outside of the kernel's image passes untouched: the decompressor and the boot code, the
//!   real mode trampoline, the vDSO, which runs in user mode, kexec's purgatory, EFI's stub, and
//!   the build's own programs.
//! - Code that the kernel copies to another place before it runs it gets records without slots. A
//!   jump to a monitor would not survive the copy.

use crate::rewrite::Treatment;

/// Parts of the paths of files that are not in the image, or do not run there.
const UNTOUCHED: &[&str] =
    &["/arch/x86/realmode/rm/", "/vdso/", "/vdso32/", "/vdso64/", "/vdsox32/", "/purgatory/", "/libstub/"];
/// Directories of the build's own root. A module outside of the root has a path that may contain
/// any of these names.
const BUILDS_OWN: &[&str] = &["scripts/", "tools/", "samples/", "usr/"];

/// Directory of the setup code. Since 6.15 one directory beneath it belongs to the kernel.
const BOOT: &str = "arch/x86/boot/";
const OF_THE_KERNEL: &str = "startup/";

/// Beginnings of the names of files whose code is copied.
const COPIED: &[&str] = &[
    "arch/x86/kernel/relocate_kernel_",
    "arch/x86/kernel/ftrace_64.",
    "arch/x86/kernel/kprobes/opt.",
    "arch/x86/power/hibernate_asm_",
    "arch/x86/mm/mem_encrypt_boot.",
];

/// Returns the treatment of the file that becomes `output`; `None` if it passes untouched.
#[must_use]
pub fn treatment(output: &str) -> Option<Treatment> {
    let relative = output.trim_start_matches("./");
    let path = format!("/{relative}");
    let own = BUILDS_OWN.iter().any(|directory| relative.starts_with(directory));
    let boot = path.split_once(&format!("/{BOOT}")).is_some_and(|(_, rest)| !rest.starts_with(OF_THE_KERNEL));
    if output == "/dev/null" || own || boot || UNTOUCHED.iter().any(|part| path.contains(part)) {
        return None;
    }
    let copied = COPIED.iter().any(|name| path.contains(&format!("/{name}")));
    Some(if copied { Treatment::Left } else { Treatment::Slots })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_apart_by_their_place() {
        for output in [
            "arch/x86/boot/main.o",
            "arch/x86/boot/compressed/head_64.o",
            "arch/x86/realmode/rm/trampoline_64.o",
            "arch/x86/entry/vdso/vclock_gettime.o",
            "/k/arch/x86/purgatory/entry64.o",
            "drivers/firmware/efi/libstub/x86-stub.o",
            "scripts/mod/empty.o",
            "usr/initramfs_data.o",
            "/dev/null",
        ] {
            assert_eq!(treatment(output), None, "{output}");
        }
        for output in [
            "init/main.o",
            "/usr/src/tools/a.o",
            "arch/x86/realmode/init.o",
            "/k/arch/x86/entry/entry_64.o",
            "lib/usercopy.o",
            "arch/x86/boot/startup/sme.o",
        ] {
            assert_eq!(treatment(output), Some(Treatment::Slots), "{output}");
        }
        for output in ["arch/x86/kernel/relocate_kernel_64.o", "./arch/x86/kernel/ftrace_64.o"] {
            assert_eq!(treatment(output), Some(Treatment::Left), "{output}");
        }
    }
}
