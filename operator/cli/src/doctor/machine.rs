//! The facts that doctor judges, read once, so that judging them is a pure function.

use mercury_abi::{
    code::Code,
    facts::CpuFacts,
    ioctl::{MERCURY_MODE_ATTACHED, MERCURY_STATE_UNLOADED},
};
use mercury_control::{
    cpus::CpuSet,
    device::{Access, Device},
    driver::Driver,
    error::{Error, Result},
    lockdown, module, monitor,
    processor::cpuid_facts,
    sysroot::{Module, Sysroot},
};
use mercury_relocation::{
    refusals::{self, Answer, Operation},
    restore::prepared,
};
use std::path::PathBuf;

/// EFI variable with the state of Secure Boot: four bytes of attributes, then the value.
const SECURE_BOOT: &str = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// Order of the largest blocks that a load needs: 32 pages (128 KiB), for the image.
pub const IMAGE_ORDER: usize = 5;

/// Operations that doctor checks.
const ANSWERED: [Operation; 4] =
    [Operation::Checkpoint, Operation::PowerOff, Operation::Snapshot, Operation::Migrate];

/// The answer of the driver.
#[derive(Clone, Debug)]
pub enum Asked {
    /// The driver answered.
    Answered {
        /// Facts of each online CPU, as if it were native.
        facts: Vec<CpuFacts>,
        /// True if the hypervisor is in memory already.
        hypervisor_loaded: bool,
        /// CPUs that are attached now.
        attached: CpuSet,
        /// Reason why no other snapshot of memory can be made now.
        snapshot: Option<Code>,
    },
    /// The driver could not be asked.
    Unavailable(Error),
}

/// The facts about a machine.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Release of the kernel, as `uname -r` prints it.
    pub release: String,
    /// True if this process may load modules.
    pub root: bool,
    pub asked: Asked,
    /// CPUID leaves as user space sees them, on any CPU.
    pub cpuid: CpuFacts,
    pub offline: CpuSet,
    /// Modules that use hardware virtualization.
    pub holders: Vec<Module>,
    /// Features of KVM that make a CPU detach when it runs a virtual machine with them; empty if
    /// there are no virtual machines.
    pub kvm_departs: Vec<&'static str>,
    /// True if KVM takes the hardware as soon as it is loaded; `None` if the parameter does not
    /// exist.
    pub kvm_enables_at_load: Option<bool>,
    /// Mode of kernel lockdown.
    pub lockdown: Option<lockdown::Mode>,
    /// True if Secure Boot is on.
    pub secure_boot: Option<bool>,
    /// True if the kernel accepts only signed modules.
    pub signatures_enforced: Option<bool>,
    /// True if the driver is in the kernel.
    pub driver_loaded: bool,
    /// File of the driver for this kernel, if it is installed.
    pub driver_file: Option<PathBuf>,
    /// True if the headers of the running kernel are installed.
    pub headers: bool,
    /// True if a kernel for kexec is loaded.
    pub kexec_loaded: bool,
    /// True if a crash kernel is loaded.
    pub crash_kernel_loaded: bool,
    /// Active live patches.
    pub livepatches: Vec<String>,
    /// True if the kernel debugger is configured.
    pub kgdb: bool,
    pub iommus: usize,
    pub command_line: String,
    /// Number of free blocks of [`IMAGE_ORDER`].
    pub free_blocks: Option<u64>,
    /// Reasons against each operation on the whole machine; `None` if this process is not root.
    pub answers: Option<Vec<(Operation, Vec<Answer>)>>,
    /// True if local file systems are mounted for writing.
    pub local_disks: bool,
    /// Reasons why prepared restore environments would refuse an image of now.
    pub outdated: Vec<Error>,
    /// Mercury's monitor, if it runs this machine as a guest of another one.
    pub monitor: Option<Monitor>,
}

/// Mercury's monitor beneath a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Monitor {
    /// True if it stands in for the hypervisor when the guest moves away.
    pub answers_calls: bool,
}

impl Monitor {
    /// Asks the processor.
    fn read() -> Option<Self> {
        monitor::is_guest().then(|| Self { answers_calls: monitor::ports().is_some() })
    }
}

impl Machine {
    /// Reads this machine. Loads the driver if that is possible, and removes it again.
    #[must_use]
    pub fn read(module: Option<&std::path::Path>, sysroot: &Sysroot) -> Self {
        let root = rustix::process::geteuid().is_root();
        let driver_loaded = module::is_loaded(sysroot);
        let asked = ask(module, sysroot).unwrap_or_else(Asked::Unavailable);
        let answers = root
            .then(|| ANSWERED.map(|operation| (operation, refusals::ask(operation, &[], sysroot))).into());
        // Only root reads the record.
        let outdated = if root { prepared::refusals(sysroot) } else { Vec::new() };
        Self { root, asked, driver_loaded, answers, outdated, ..Self::read_files(module, sysroot) }
    }

    /// Reads all facts that are in files.
    fn read_files(file: Option<&std::path::Path>, sysroot: &Sysroot) -> Self {
        let release = release();
        let flag = |path: &str| sysroot.flag(path);
        Self {
            root: false,
            asked: Asked::Unavailable(
                Error::new(mercury_control::exit::Exit::State, "not asked").hint("run `sudo mercury doctor`"),
            ),
            cpuid: cpuid_facts(),
            offline: sysroot.cpu_list("sys/devices/system/cpu/offline"),
            holders: module::holders(sysroot),
            kvm_departs: module::kvm_departs(sysroot),
            kvm_enables_at_load: flag("sys/module/kvm/parameters/enable_virt_at_load"),
            lockdown: lockdown::Mode::read(sysroot),
            secure_boot: sysroot.bytes(SECURE_BOOT).map(|bytes| bytes.get(4) == Some(&1)),
            signatures_enforced: flag("sys/module/module/parameters/sig_enforce"),
            driver_loaded: false,
            driver_file: file.map(PathBuf::from).or_else(|| module::installed(sysroot, &release)),
            headers: sysroot.exists(&format!("lib/modules/{release}/build")),
            kexec_loaded: flag("sys/kernel/kexec_loaded").unwrap_or(false),
            crash_kernel_loaded: flag("sys/kernel/kexec_crash_loaded").unwrap_or(false),
            livepatches: sysroot.names("sys/kernel/livepatch"),
            kgdb: sysroot.text("sys/module/kgdboc/parameters/kgdboc").is_some_and(|text| !text.is_empty()),
            iommus: sysroot.names("sys/class/iommu").len(),
            command_line: sysroot.text("proc/cmdline").unwrap_or_default(),
            free_blocks: sysroot.free_blocks(IMAGE_ORDER),
            answers: None,
            local_disks: refusals::refuse_disks(sysroot).is_err(),
            outdated: Vec::new(),
            monitor: Monitor::read(),
            release,
        }
    }

    /// Returns major and minor version of the kernel as a Linux version code; 0 if it cannot be
    /// read.
    #[must_use]
    pub fn kernel_version(&self) -> u64 {
        version_code(&self.release).unwrap_or(0)
    }
}

/// Returns the kernel's release, as `uname -r` prints it.
#[must_use]
pub fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Converts a release such as `6.1.0-13-amd64` to a Linux version code.
#[must_use]
pub fn version_code(release: &str) -> Option<u64> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u64>);
    let (major, minor) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    Some(major << 16 | minor.min(255) << 8)
}

/// Asks the driver, and loads it for that if needed.
fn ask(module: Option<&std::path::Path>, sysroot: &Sysroot) -> Result<Asked> {
    let inserted = rustix::process::geteuid().is_root() && module::insert(module, sysroot)?;
    let asked = Device::open(Access::Observe).and_then(|device| ask_device(&device, sysroot));
    if inserted {
        // Another process may have begun to use the driver; then it stays.
        let _ = module::remove();
    }
    asked
}

fn ask_device(driver: &dyn Driver, sysroot: &Sysroot) -> Result<Asked> {
    let system = driver.system()?;
    let loaded = system.state != MERCURY_STATE_UNLOADED;
    // A driver that has loaded nothing asks the CPUs as well, because a hypervisor that an earlier
    // driver left behind would answer.
    let attached =
        driver.status()?.iter().filter(|cpu| cpu.mode == MERCURY_MODE_ATTACHED).map(|cpu| cpu.cpu).collect();
    let mut facts = Vec::new();
    for cpu in sysroot.online_cpus().iter() {
        facts.extend(driver.facts(cpu)?.map(|facts| without_mercury(facts, &attached)));
    }
    let snapshot = (system.snapshot.live != 0).then_some(Code::SnapshotLive);
    Ok(Asked::Answered { facts, hypervisor_loaded: loaded, attached, snapshot })
}

/// Returns the facts of a CPU as if it were native.
fn without_mercury(facts: CpuFacts, attached: &CpuSet) -> CpuFacts {
    if attached.contains(facts.cpu) { mercury_preflight::as_if_native(&facts) } else { facts }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(version_code("6.1.0-13-amd64"), Some(6 << 16 | 1 << 8));
        assert_eq!(version_code("6.12.107+deb13-cloud-amd64"), Some(6 << 16 | 12 << 8));
        assert_eq!(version_code("weird"), None);
    }

    #[test]
    fn reads_files_below_a_root() {
        let root = tempfile::tempdir().expect("temporary directory");
        let write = |path: &str, text: &[u8]| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("parent")).expect("directory");
            std::fs::write(path, text).expect("file");
        };
        write("proc/modules", b"kvm_amd 1 0 - Live 0x0\nkvm 1 1 kvm_amd, Live 0x0\n");
        write("sys/module/kvm/parameters/enable_virt_at_load", b"Y\n");
        write("sys/module/module/parameters/sig_enforce", b"N\n");
        write(SECURE_BOOT, &[6, 0, 0, 0, 1]);
        write("sys/kernel/kexec_crash_loaded", b"1\n");
        let machine = Machine::read_files(None, &Sysroot::at(root.path()));
        assert_eq!(machine.holders.len(), 1);
        assert!(machine.kvm_departs.is_empty());
        assert_eq!(machine.kvm_enables_at_load, Some(true));
        assert_eq!(machine.signatures_enforced, Some(false));
        assert_eq!(machine.secure_boot, Some(true));
        assert!(machine.crash_kernel_loaded && !machine.kexec_loaded);
        assert_eq!(machine.lockdown, None);
    }

    #[test]
    fn an_attached_cpu_is_judged_as_if_native() {
        let mut facts = mercury_preflight::example::good_epyc(1);
        facts.efer |= 1 << 12;
        let one: CpuSet = [1].into_iter().collect();
        assert!(mercury_preflight::check(&without_mercury(facts, &one)).is_empty());
        assert!(!mercury_preflight::check(&without_mercury(facts, &CpuSet::default())).is_empty());
        // A value of another hypervisor is reported, attached or not.
        facts.vm_hsave_pa = 0x1000;
        let found = mercury_preflight::check(&without_mercury(facts, &one));
        let codes: Vec<_> = found.iter().map(|finding| finding.code).collect();
        assert_eq!(codes, [mercury_abi::code::Code::HsaveInUse]);
        let mut facts = mercury_preflight::example::good_xeon(1);
        facts.cr4 |= 1 << 13;
        assert!(mercury_preflight::check(&without_mercury(facts, &one)).is_empty());
    }
}
