//! The description of a machine.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use crate::{
    driver::Variant,
    error::{Error, Result},
    image::Release,
    iommu::Iommu,
    kernel::Kernel,
    previrtualization::{self, Flavour},
    tsc,
};

/// The processor unless a machine asks for another: SVM with nested paging, as far as QEMU emulates it.
pub const CPU: &str = "EPYC,+svm,+npt";

/// In seconds. A kernel in Bochs takes most of a minute for the checksum of a crash kernel.
const PATIENT_WATCHDOG: &str = "watchdog_thresh=60";

/// If this is set, machines of Debian 12's cloud kernel boot one that checks its locks instead.
const CHECKED: &str = "MERCURY_LAB_CHECKED";

/// The kernel that machines of this release boot in place of the cloud kernel, if one is wanted; built now if it is not there.
///
/// # Errors
/// If it does not build.
pub(crate) fn checked_kernel(release: Release) -> Result<Option<PathBuf>> {
    let wanted = std::env::var(CHECKED).is_ok_and(|value| !value.is_empty());
    if release != Release::Bookworm || !wanted {
        return Ok(None);
    }
    Ok(Some(previrtualization::build(release, Flavour::Checked)?.image))
}

/// The emulator's name.
pub const QEMU: &str = "qemu-system-x86_64";

/// What emulates a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Platform {
    /// QEMU, with an AMD processor in the words of [`Spec::cpu`].
    Qemu,
    /// Bochs, with a processor that exists.
    Bochs(Model),
}

/// A processor of Bochs's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// AMD's Zen: SVM with next-RIP and flushes by address-space identifier.
    Ryzen,
    /// Intel's Core i7-2600K of 2011, without 1 GiB pages.
    SandyBridge,
    /// Intel's Core i7-4770 of 2013.
    Haswell,
    /// Intel's Core i7-7800X of 2017, with AVX-512.
    SkylakeX,
    /// Intel's Core i5-1135G7 of 2020, with control-flow enforcement and protection keys.
    TigerLake,
}

/// Whose processor a machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// AMD: SVM.
    Amd,
    /// Intel: VMX.
    Intel,
}

impl Vendor {
    /// KVM's module for it.
    #[must_use]
    pub fn kvm_module(self) -> &'static str {
        match self {
            Self::Amd => "kvm_amd",
            Self::Intel => "kvm_intel",
        }
    }

    /// What names its code in the driver and in the hypervisor begin with.
    #[must_use]
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Amd => "svm",
            Self::Intel => "vmx",
        }
    }
}

impl Platform {
    const NAMES: [(&str, Self); 6] = [
        ("amd", Self::Qemu),
        ("bochs-amd", Self::Bochs(Model::Ryzen)),
        ("intel", Self::Bochs(Model::SkylakeX)),
        ("intel-sandybridge", Self::Bochs(Model::SandyBridge)),
        ("intel-haswell", Self::Bochs(Model::Haswell)),
        ("intel-tigerlake", Self::Bochs(Model::TigerLake)),
    ];

    /// Whose processor it has.
    #[must_use]
    pub fn vendor(self) -> Vendor {
        match self {
            Self::Qemu | Self::Bochs(Model::Ryzen) => Vendor::Amd,
            Self::Bochs(_) => Vendor::Intel,
        }
    }

    /// For a test that only machines of one vendor can run.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with `reason` if the chosen one is another's.
    pub fn need(vendor: Vendor, reason: &'static str) -> Result<()> {
        if Self::chosen()?.vendor() == vendor { Ok(()) } else { Err(Error::Unsupported { reason }) }
    }

    /// What `LAB` in the environment chooses for all machines that do not say otherwise.
    ///
    /// # Errors
    /// If it names nothing that there is.
    pub fn chosen() -> Result<Self> {
        std::env::var("LAB").map_or(Ok(Self::Qemu), |name| name.parse().map_err(Error::Spec))
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, platform)| platform == self).map_or("?", |(name, _)| *name);
        f.write_str(name)
    }
}

impl FromStr for Platform {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        let all = || Self::NAMES.map(|(name, _)| name).join(", ");
        found.map(|(_, platform)| *platform).ok_or_else(|| format!("LAB={name}: there are {}", all()))
    }
}

/// What a disk hangs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bus {
    /// NVMe. QEMU cannot save its state: no `savevm`.
    Nvme,
    /// virtio-blk.
    Virtio,
    /// AHCI. The cloud kernels have no driver for it.
    Ahci,
    /// USB storage, for a disk that no root is on. The cloud kernels have no driver for it.
    Usb,
}

/// A network card on QEMU's user network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nic {
    /// virtio-net.
    Virtio,
    /// Intel's e1000e. The cloud kernels have no driver for it.
    E1000e,
}

/// What runs as the first process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    /// The lab's agent: quickest.
    Agent,
    /// systemd, with the agent as a service.
    Systemd,
}

/// What a reset does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reset {
    /// Ends QEMU: a panic is then seen at once.
    Ends,
    /// Starts the machine again, as on metal.
    Restarts,
}

/// Counting instructions instead of time: deterministic, for one processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Icount {
    /// One instruction takes a nanosecond of the machine's time.
    Exact,
    /// 2^shift nanoseconds an instruction, and an idle machine does not wait for the wall's time.
    NoSleep {
        /// The power of two.
        shift: u8,
    },
}

/// The emulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Qemu {
    /// The one that this host has.
    Host,
    /// See [`crate::emulator::newer_qemu`].
    Newer,
}

/// Where the serial console goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Console {
    /// Into the machine's log only.
    Log,
    /// To this terminal as well, with a shell on it.
    Terminal,
    /// To a socket as well: see [`crate::Machine::console`].
    Socket,
}

/// A machine to be booted. All have a serial console, a root disk that is theirs alone and lost with
/// them, and the artefacts' disk at `/mercury`.
#[derive(Clone, Debug)]
pub struct Spec {
    pub(crate) platform: Platform,
    pub(crate) kernel: Kernel,
    pub(crate) own_kernel: Option<PathBuf>,
    pub(crate) cpus: u32,
    pub(crate) max_cpus: u32,
    pub(crate) memory_mib: u32,
    pub(crate) cpu_model: String,
    pub(crate) phys_bits: Option<u8>,
    pub(crate) root_bus: Bus,
    pub(crate) disks: Vec<(Bus, u32)>,
    pub(crate) nic: Option<Nic>,
    pub(crate) iommu: Option<Iommu>,
    pub(crate) icount: Option<Icount>,
    pub(crate) kernel_args: Vec<String>,
    pub(crate) init: Init,
    pub(crate) modules: Variant,
    pub(crate) reset: Reset,
    pub(crate) gdb_port: Option<u16>,
    pub(crate) wants_gdb: bool,
    pub(crate) qemu: String,
    pub(crate) qemu_version: Qemu,
    pub(crate) qemu_args: Vec<String>,
    pub(crate) uefi_variables: bool,
    pub(crate) console: Console,
    pub(crate) boot_limit: Duration,
}

impl Spec {
    /// A machine with `kernel`, two processors, 1 GiB and nothing special.
    #[must_use]
    pub fn new(kernel: Kernel) -> Self {
        Self {
            platform: Platform::chosen().unwrap_or(Platform::Qemu),
            kernel,
            own_kernel: None,
            cpus: 2,
            max_cpus: 0,
            memory_mib: 1024,
            cpu_model: CPU.to_owned(),
            phys_bits: None,
            root_bus: Bus::Nvme,
            disks: Vec::new(),
            nic: None,
            iommu: None,
            icount: None,
            kernel_args: Vec::new(),
            init: Init::Agent,
            modules: Variant::Production,
            reset: Reset::Ends,
            gdb_port: None,
            wants_gdb: false,
            qemu: QEMU.to_owned(),
            // 7.2 now and then executes a breakpoint that 6.12, patching its own text, has taken away
            // again: a page could be written while it was translated, until 8.1.
            qemu_version: if kernel.release() == Release::Trixie { Qemu::Newer } else { Qemu::Host },
            qemu_args: Vec::new(),
            uefi_variables: false,
            console: Console::Log,
            boot_limit: Duration::from_secs(90),
        }
    }

    /// What emulates it, whatever `LAB` says.
    #[must_use]
    pub fn platform(mut self, platform: Platform) -> Self {
        self.platform = platform;
        self
    }

    /// A kernel that was built here, with all drivers that it needs built in, in place of Debian's. The rest of the
    /// machine is the release's.
    #[must_use]
    pub fn own_kernel(mut self, image: &Path) -> Self {
        // The emulator runs in a directory of its own.
        self.own_kernel = Some(std::path::absolute(image).unwrap_or_else(|_| image.to_owned()));
        self
    }

    /// Processors at the start.
    #[must_use]
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Processors that it may grow to by hotplug.
    #[must_use]
    pub fn max_cpus(mut self, cpus: u32) -> Self {
        self.max_cpus = cpus;
        self
    }

    /// Memory, in MiB.
    #[must_use]
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Another processor, in QEMU's words: `EPYC,-svm`, `max,+la57` …
    #[must_use]
    pub fn cpu(mut self, model: &str) -> Self {
        model.clone_into(&mut self.cpu_model);
        self
    }

    /// Changes of the processor's features: `+la57`, `-pdpe1gb`, `-svm` …
    #[must_use]
    pub fn cpu_feature(mut self, feature: &str) -> Self {
        self.cpu_model += &format!(",{feature}");
        self
    }

    /// Width of physical addresses, in bits.
    #[must_use]
    pub fn phys_bits(mut self, bits: u8) -> Self {
        self.phys_bits = Some(bits);
        self
    }

    /// The bus of the root disk and of the artefacts' disk.
    #[must_use]
    pub fn root_bus(mut self, bus: Bus) -> Self {
        self.root_bus = bus;
        self
    }

    /// One more disk, empty, of a size in MiB.
    #[must_use]
    pub fn disk(mut self, bus: Bus, mib: u32) -> Self {
        self.disks.push((bus, mib));
        self
    }

    /// A network card.
    #[must_use]
    pub fn nic(mut self, nic: Nic) -> Self {
        self.nic = Some(nic);
        self
    }

    /// An IOMMU in front of all devices, in a QEMU that has one that translates.
    #[must_use]
    pub fn iommu(mut self, iommu: Iommu) -> Self {
        self.iommu = Some(iommu);
        self.qemu_version(Qemu::Newer)
    }

    /// Counts instructions; the machine must have one processor.
    #[must_use]
    pub fn icount(mut self, icount: Icount) -> Self {
        self.icount = Some(icount);
        self
    }

    /// One more word on the kernel's command line.
    #[must_use]
    pub fn kernel_arg(mut self, word: &str) -> Self {
        self.kernel_args.push(word.to_owned());
        self
    }

    /// What runs as the first process.
    #[must_use]
    pub fn init(mut self, init: Init) -> Self {
        self.init = init;
        self
    }

    /// Which variant of the driver `mercury` uses there, by `MERCURY_MODULE`.
    #[must_use]
    pub fn modules(mut self, variant: Variant) -> Self {
        self.modules = variant;
        self
    }

    /// What a reset does.
    #[must_use]
    pub fn reset(mut self, reset: Reset) -> Self {
        self.reset = reset;
        self
    }

    /// A port for gdb on this host's loopback: see `Machine::gdb_port`.
    #[must_use]
    pub fn gdb(mut self) -> Self {
        self.wants_gdb = true;
        self
    }

    /// Another QEMU.
    #[must_use]
    pub fn qemu(mut self, program: &str) -> Self {
        program.clone_into(&mut self.qemu);
        self
    }

    /// Another version of QEMU; it is made when the machine boots, if it is not there.
    #[must_use]
    pub fn qemu_version(mut self, version: Qemu) -> Self {
        self.qemu_version = version;
        self
    }

    /// One more argument for QEMU, as it is.
    #[must_use]
    pub fn qemu_arg(mut self, argument: &str) -> Self {
        self.qemu_args.push(argument.to_owned());
        self
    }

    /// Free slots for memory of up to 4 GiB in all, and the kernel uses what is plugged in at once.
    #[must_use]
    pub fn memory_slots(self) -> Self {
        self.qemu_arg("-m").qemu_arg("slots=4,maxmem=4G").kernel_arg("memhp_default_state=online")
    }

    /// A DIMM of 128 MiB that is there from the start. The firmware's memory map does not have it.
    #[must_use]
    pub fn dimm(self, id: &str) -> Self {
        Self::dimm_arguments(id).iter().fold(self, |spec, argument| spec.qemu_arg(argument))
    }

    /// QEMU's arguments for a DIMM of 128 MiB.
    #[must_use]
    pub fn dimm_arguments(id: &str) -> [String; 4] {
        let memory = format!("memory-backend-ram,id={id}-memory,size=128M");
        ["-object".into(), memory, "-device".into(), format!("pc-dimm,id={id},memdev={id}-memory")]
    }

    /// UEFI's firmware in place of a BIOS, on QEMU.
    #[must_use]
    pub fn uefi(self) -> Self {
        self.qemu_arg("-bios").qemu_arg("/usr/share/ovmf/OVMF.fd")
    }

    /// The same in a flash of the machine's own, which keeps its variables: otherwise it writes them to the first FAT file
    /// system that it finds.
    #[must_use]
    pub fn uefi_with_variables(mut self) -> Self {
        self.uefi_variables = true;
        self
    }

    /// Where the console goes.
    #[must_use]
    pub fn console(mut self, console: Console) -> Self {
        self.console = console;
        self
    }

    /// How long the way to the agent's first word may take, in wall time.
    #[must_use]
    pub fn boot_limit(mut self, limit: Duration) -> Self {
        self.boot_limit = limit;
        self
    }

    /// One line for people.
    #[must_use]
    pub fn summary(&self) -> String {
        let cpu = match self.platform {
            Platform::Qemu => self.cpu_model.clone(),
            bochs @ Platform::Bochs(_) => bochs.to_string(),
        };
        format!("{}, {} CPUs ({cpu}), {} MiB", self.kernel, self.cpus, self.memory_mib)
    }

    /// Refuses what cannot work, by name.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |why: &str| Err(Error::Spec(why.to_owned()));
        let cloud = matches!(self.kernel, Kernel::BookwormCloud | Kernel::TrixieCloud);
        let other = self.root_bus == Bus::Ahci
            || self.disks.iter().any(|(bus, _)| matches!(bus, Bus::Ahci | Bus::Usb));
        if self.cpus == 0 || (self.max_cpus != 0 && self.max_cpus < self.cpus) {
            return refuse("more processors at the start than it may grow to, or none");
        }
        if self.icount.is_some() && self.cpus.max(self.max_cpus) > 1 {
            return refuse("with icount a second processor never comes up");
        }
        if let Some(reason) = self.unsupported() {
            return Err(Error::Unsupported { reason });
        }
        if self.root_bus == Bus::Usb {
            return refuse("the initramfs has no driver for USB");
        }
        if cloud && (other || self.nic == Some(Nic::E1000e)) {
            return refuse("the cloud kernels have no driver for AHCI, USB and e1000e");
        }
        if self.iommu.is_some() && self.qemu_version != Qemu::Newer {
            return refuse("this host's QEMU translates for no AMD IOMMU");
        }
        if cloud && self.iommu == Some(Iommu::Amd) {
            return refuse("the cloud kernels have no driver for AMD's IOMMU");
        }
        Ok(())
    }

    /// What a machine in Bochs cannot have.
    fn unsupported(&self) -> Option<&'static str> {
        let wanted = [
            (
                !self.disks.is_empty() || self.root_bus != Bus::Nvme,
                "Bochs has IDE disks only, and none to spare",
            ),
            (self.nic.is_some(), "Bochs has no network card that the lab uses"),
            (self.iommu.is_some(), "Bochs has no IOMMU"),
            (self.cpu_model != CPU || self.phys_bits.is_some(), "this is about a processor of QEMU's"),
            (self.console != Console::Log, "Bochs shows its console on no terminal"),
            (self.max_cpus != 0, "Bochs has no hotplug of processors"),
            (self.wants_gdb, "Bochs has no gdb stub for several processors"),
            (self.icount.is_some(), "this counts instructions with QEMU's icount"),
            (!self.qemu_args.is_empty() || self.uefi_variables, "this is about a device of QEMU's"),
        ];
        let found = wanted.into_iter().find(|(wanted, _)| *wanted && self.platform != Platform::Qemu);
        found.map(|(_, reason)| reason)
    }

    /// `panic=-1`: a panic ends the machine at once.
    pub(crate) fn kernel_command_line(&self) -> String {
        let init = if self.init == Init::Systemd { "systemd" } else { "agent" };
        let mut words = vec![
            "console=ttyS0".to_owned(),
            "quiet".to_owned(),
            "no_timer_check".to_owned(),
            "panic=-1".to_owned(),
            format!("lab.init={init}"),
            format!("lab.host={}", self.kernel.release()),
            format!("lab.modules={}", self.modules.directory()),
        ];
        words.extend(self.clock());
        if self.platform != Platform::Qemu {
            words.push("lab.port=ttyS1".to_owned());
        }
        if self.console == Console::Terminal {
            words.push("lab.shell=1".to_owned());
        }
        words.extend(self.iommu.and_then(Iommu::kernel_argument).map(str::to_owned));
        words.extend(self.kernel_args.iter().cloned());
        words.join(" ")
    }

    /// The emulated TSC is reliable, and without this the kernel would use the HPET; but for the frequency
    /// that Bochs's later models say they have: time would pass fifty times too slowly, or more so. Where it
    /// counts instructions the kernel finds its frequency for itself.
    fn clock(&self) -> Vec<String> {
        let words: &[&str] = match self.platform {
            Platform::Bochs(Model::SkylakeX | Model::TigerLake) => {
                &["tsc=unstable", "clocksource=acpi_pm", PATIENT_WATCHDOG]
            }
            Platform::Bochs(_) => &["tsc=reliable", PATIENT_WATCHDOG],
            Platform::Qemu => &["tsc=reliable"],
        };
        let frequency = (self.platform == Platform::Qemu && self.icount.is_none())
            .then(|| format!("tsc_early_khz={}", tsc::khz()));
        words.iter().map(|&word| word.to_owned()).chain(frequency).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_refused() {
        let spec = || Spec::new(Kernel::BookwormCloud);
        assert!(spec().cpus(0).check().is_err());
        assert!(spec().cpus(4).max_cpus(2).check().is_err());
        assert!(spec().icount(Icount::Exact).check().is_err());
        assert!(spec().root_bus(Bus::Ahci).check().is_err());
        assert!(spec().nic(Nic::E1000e).check().is_err());
        assert!(spec().iommu(Iommu::Amd).check().is_err());
        assert!(spec().iommu(Iommu::Intel).qemu_version(Qemu::Host).check().is_err());
        assert!(spec().iommu(Iommu::Intel).check().is_ok());
        assert!(spec().cpus(1).icount(Icount::Exact).check().is_ok());
    }
}
