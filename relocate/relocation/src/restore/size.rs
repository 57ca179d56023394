//! The memory that a restore environment needs.
//!
//! Its kernel has so much memory and no more (`mem=`). A kernel that cannot unpack its initial RAM disk
//! starts the first process of half an archive, and panics: the machine is off by then, and its image has
//! not been read. So the need is computed before, and less than it is refused.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::bytes,
    sysroot::Sysroot,
};

/// Memory for the environment's own work besides: modules that are loaded, buffers, tables.
const WORK: u64 = 24 << 20;
/// Memory for what the kernel has for each CPU: threads, stacks and caches.
const PER_CPU: u64 = 512 << 10;
/// What a kernel adds to its static part of each CPU's memory: `PERCPU_MODULE_RESERVE` and
/// `PERCPU_DYNAMIC_RESERVE` (include/linux/percpu.h).
const PER_CPU_DYNAMIC: u64 = 36 << 10;
/// The kernel's size if /proc/iomem does not tell.
const KERNEL: u64 = 48 << 20;
/// `sizeof(struct page)`, for each page of 4 KiB.
const PAGE_STRUCTURE: u64 = 64;
/// The need is rounded up to this.
const STEP_MIB: u64 = 16;

/// The need of an environment, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// The kernel's code and data.
    kernel: u64,
    /// The kernel's memory for all possible CPUs.
    cpus: u64,
    /// The initial RAM disk, which is there twice while it is unpacked.
    archive: u64,
}

impl Need {
    /// Returns the need of this system's kernel with an initial RAM disk of so many bytes.
    #[must_use]
    pub fn of(archive: u64, sysroot: &Sysroot) -> Self {
        let cpus = sysroot.possible_cpus().iter().count() as u64;
        Self { kernel: kernel(sysroot), cpus: cpus * (static_per_cpu(sysroot) + PER_CPU), archive }
    }

    /// Returns the memory without which the environment cannot start, in MiB.
    #[must_use]
    pub fn least_mib(self) -> u64 {
        in_mib(self.kernel + self.cpus + 2 * self.archive)
    }

    /// Returns the memory that it should have, in MiB.
    #[must_use]
    pub fn mib(self) -> u64 {
        in_mib(self.kernel + self.cpus + 2 * self.archive + WORK).next_multiple_of(STEP_MIB)
    }

    /// Returns the memory that it gets, in MiB: what the operator wants, or what it needs and at least
    /// `usual`.
    ///
    /// # Errors
    ///
    /// Returns an error if the operator wants less than it needs.
    pub fn choose(self, wanted: Option<u64>, usual: u64) -> Result<u64> {
        let Some(wanted) = wanted else { return Ok(usual.max(self.mib())) };
        if wanted >= self.least_mib() {
            return Ok(wanted);
        }
        let text = format!(
            "the restore environment cannot start in {wanted} MiB: its kernel takes {}, its CPUs {}, and its \
             initial RAM disk twice {}",
            bytes(self.kernel),
            bytes(self.cpus),
            bytes(self.archive)
        );
        let hint = format!("leave --memory out, or say --memory {}M or more", self.mib());
        Err(Error::new(Exit::Impossible, text).hint(hint))
    }
}

/// Adds the kernel's list of pages, and rounds up to MiB.
fn in_mib(bytes: u64) -> u64 {
    (bytes + bytes / 4096 * PAGE_STRUCTURE).div_ceil(1 << 20)
}

/// Returns the size of the running kernel's code and data.
fn kernel(sysroot: &Sysroot) -> u64 {
    let text = sysroot.text("proc/iomem").unwrap_or_default();
    let size = |line: &str| {
        let (range, name) = line.trim().split_once(" : ")?;
        let (first, last) = range.split_once('-')?;
        let number = |digits| u64::from_str_radix(digits, 16).ok();
        name.starts_with("Kernel ")
            .then(|| number(last)?.checked_sub(number(first)?)?.checked_add(1))
            .flatten()
    };
    let sum: u64 = text.lines().filter_map(size).sum();
    // Who may not see addresses sees zeros.
    if sum < 1 << 20 { KERNEL } else { sum }
}

/// Returns the size of the running kernel's variables that each CPU has.
fn static_per_cpu(sysroot: &Sysroot) -> u64 {
    let text = sysroot.text("proc/kallsyms").unwrap_or_default();
    let end = text.lines().find(|line| line.ends_with(" __per_cpu_end"));
    let size = end.and_then(|line| u64::from_str_radix(line.split(' ').next()?, 16).ok());
    // From 6.15 on the variables have addresses of the kernel's own.
    size.filter(|size| *size < 16 << 20).unwrap_or(PER_CPU) + PER_CPU_DYNAMIC
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn machine(cpus: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (path, text) in [
            (
                "proc/iomem",
                "00100000-3fffffff : System RAM\n  01000000-01ffffff : Kernel code\n  \
                 02000000-029fffff : Kernel rodata\n  02a00000-02dfffff : Kernel data\n  \
                 03000000-03ffffff : Kernel bss\n",
            ),
            ("proc/kallsyms", "0000000000000000 A __per_cpu_start\n0000000000034000 A __per_cpu_end\n"),
            ("sys/devices/system/cpu/possible", cpus),
        ] {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        }
        folder
    }

    fn need(cpus: &str, archive_mib: u64) -> Need {
        Need::of(archive_mib << 20, &Sysroot::at(machine(cpus).path()))
    }

    #[test]
    fn the_kernel_is_what_it_says() {
        assert_eq!(need("0-1\n", 20).kernel, 46 << 20);
        assert_eq!(kernel(&Sysroot::at("/nowhere")), KERNEL);
    }

    /// Debian's kernel for all hardware, with a driver that has its debugging information, did not start
    /// in 128 MiB.
    #[test]
    fn a_large_initial_ram_disk_gets_more() {
        let choose = |need: Need| need.choose(None, 128).expect("a size");
        assert_eq!(choose(need("0-1\n", 15)), 128);
        assert!(choose(need("0-1\n", 28)) >= 46 + 2 * 28 + 24);
    }

    #[test]
    fn many_cpus_get_more() {
        let (few, many) = (need("0-1\n", 15), need("0-511\n", 15));
        assert!(many.mib() > few.mib() + 256, "{many:?}");
    }

    #[test]
    fn what_cannot_start_is_refused_with_a_size_that_can() {
        let need = need("0-1\n", 28);
        let error = need.choose(Some(64), 128).expect_err("too little");
        assert!(error.hint.iter().any(|hint| hint.contains(&format!("{}M", need.mib()))), "{error:?}");
        assert_eq!(need.choose(Some(need.least_mib()), 128).ok(), Some(need.least_mib()));
        assert!(need.choose(Some(need.mib()), 128).is_ok());
    }
}
