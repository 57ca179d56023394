//! The Debian package on both releases, as an operator has it: installed on a machine that systemd
//! has booted, its module built there by DKMS, used, upgraded while attached, and purged.
//!
//! Compiling under emulation takes a minute. It is done once a release: at the first installation
//! on Debian 13, and at the upgrade on Debian 12.

#![allow(clippy::unwrap_used)]

use std::{
    collections::HashSet,
    path::Path,
    time::{Duration, Instant},
};

use mercury_lab::{Init, Kernel, Machine, Result, Spec, deb};
use serde_json::Value;

/// Time limit of the compiler, on a host with other work.
const PATIENCE: Duration = Duration::from_secs(900);

/// The folder of DKMS's modules.
const MODULES: &str = "/lib/modules/$(uname -r)/updates/dkms";

/// A machine with nothing of Mercury's but the package.
struct Operator {
    machine: Machine,
    start: Instant,
}

impl Operator {
    fn boot(kernel: Kernel) -> Result<Self> {
        let start = Instant::now();
        let machine = Machine::boot(Spec::new(kernel).init(Init::Systemd))?;
        let operator = Self { machine, start };
        // DKMS builds for every kernel whose headers are installed, which takes minutes here.
        operator
            .sh("cd /lib/modules && for kernel in *; do [ $kernel = $(uname -r) ] || rm -r $kernel; done")?;
        operator.say("booted");
        Ok(operator)
    }

    fn say(&self, what: &str) {
        println!("{}: {what} after {:.0} s", self.machine.kernel(), self.start.elapsed().as_secs_f32());
    }

    fn sh(&self, line: &str) -> Result<String> {
        let line = format!("unset MERCURY_MODULE; PATH=/usr/sbin:/usr/bin:/sbin:/bin; {line}");
        let command = self.machine.command(&line).env("DEBIAN_FRONTEND", "noninteractive");
        Ok(command.timeout(PATIENCE).run()?.check()?.stdout.trim_end().to_owned())
    }

    fn mercury(&self, arguments: &str) -> Result<Value> {
        Ok(serde_json::from_str(&self.sh(&format!("mercury --json {arguments}"))?).unwrap())
    }

    fn state(&self) -> Result<String> {
        Ok(self.mercury("status")?["state"].as_str().unwrap().to_owned())
    }

    /// Returns every file that a package may leave behind. The records and keys of dpkg and DKMS do
    /// not count.
    fn files(&self) -> Result<HashSet<String>> {
        const KEPT: &[&str] = &["/var/lib/dpkg/", "/var/lib/systemd/timers/", "/var/lib/dkms/mok."];
        let all = self.sh("find /usr /etc /opt /boot /var/lib -xdev")?;
        let wanted = |name: &&str| !KEPT.iter().any(|kept| name.starts_with(kept));
        Ok(all.lines().filter(wanted).map(str::to_owned).collect())
    }

    /// Installs the package, or upgrades to it.
    fn install(&self, package: &Path) -> Result<()> {
        let name = package.file_name().unwrap().display();
        self.machine.put(&format!("/root/{name}"), &std::fs::read(package).unwrap(), 0o644)?;
        // The lab's images exclude documentation; the package's own is wanted.
        let options = "--path-include='/usr/share/man/*' --path-include='/usr/share/doc/*'";
        self.sh(&format!("dpkg {options} -i /root/{name}"))?;
        self.say(&format!("{name} installed"));
        Ok(())
    }

    /// Checks that DKMS has built and installed the package's module for the running kernel, and no
    /// other.
    fn check_dkms(&self) -> Result<()> {
        let version = self.sh("dpkg-query -W -f '${Version}' mercury")?;
        let version = version.split('-').next().unwrap();
        let dkms = self.sh("dkms status mercury")?;
        assert!(dkms.contains(&format!("mercury/{version}, {}", self.machine.kernel())), "{dkms}");
        assert!(dkms.contains(": installed") && dkms.lines().count() == 1, "{dkms}");
        let module = self.sh("modinfo -F filename mercury")?;
        assert!(module.contains("/updates/dkms/mercury.ko"), "{module}");
        Ok(())
    }
}

fn documentation_is_there(operator: &Operator) -> Result<()> {
    operator.sh("for page in mercury mercury-attach mercury-doctor; do \
        zcat /usr/share/man/man8/$page.8.gz | grep -q '^.TH' || exit 1; done")?;
    operator.sh("bash -c '. /usr/share/bash-completion/completions/mercury; complete -p mercury'")?;
    operator.sh("test -s /usr/share/zsh/vendor-completions/_mercury \
        -a -s /usr/share/fish/vendor_completions.d/mercury.fish -a -s /usr/share/doc/mercury/copyright")?;
    operator
        .sh("zcat /usr/share/man/man1/afterburner-verify.1.gz | grep -q '^.TH' && afterburner --version")?;
    // An ordinary user finds the command.
    operator.sh("env -i PATH=/usr/local/bin:/usr/bin:/bin setpriv --reuid=65534 mercury --version")?;
    // Every file is as it was packed.
    operator.sh("cd / && md5sum --quiet -c /var/lib/dpkg/info/mercury.md5sums").map(drop)
}

/// Leaves KVM running above the hypervisor on Debian 13, which loads KVM by itself; KVM takes SVM
/// at load. Doctor reports that.
fn kvm_goes_on(operator: &Operator) -> Result<()> {
    operator.sh("udevadm settle; grep -w ^kvm_amd /proc/modules")?;
    let doctor = operator.sh("mercury doctor")?;
    assert!(doctor.contains("virtual machines go on while attached"), "{doctor}");
    assert!(!doctor.contains("virtualization-in-use") && doctor.contains("can attach"), "{doctor}");
    Ok(())
}

fn unit_loads_and_unloads(operator: &Operator) -> Result<()> {
    assert_eq!(operator.state()?, "no-driver");
    assert_eq!(operator.mercury("doctor")?["can_attach"], "yes");
    operator.sh("systemctl start mercury")?;
    assert_eq!(operator.state()?, "loaded");
    assert_eq!(operator.mercury("attach")?["count"], 2);
    assert_eq!(operator.state()?, "attached");
    assert_eq!(operator.mercury("detach")?["count"], 2);
    operator.mercury("attach")?;
    // Stopping the unit takes the hypervisor out first.
    operator.sh("systemctl stop mercury && test ! -e /dev/mercury -a ! -e /sys/module/mercury")?;
    assert_eq!(operator.state()?, "no-driver");
    assert_eq!(operator.sh("systemctl show -P Result mercury")?, "success");
    operator.sh("systemctl enable --now -q mercury")?;
    assert_eq!(operator.state()?, "loaded");
    operator.say("used");
    Ok(())
}

/// Loads the new hypervisor into memory again after the upgrade, if the unit is enabled.
fn upgrade_detaches(operator: &Operator) -> Result<()> {
    operator.mercury("attach")?;
    operator.install(&deb::build_as("0.9.9")?)?;
    operator.check_dkms()?;
    assert_eq!(operator.state()?, "loaded");
    assert_eq!(operator.sh("systemctl is-active mercury")?, "active");
    operator.sh("test ! -e /usr/src/mercury-0.1.0 -a ! -e /var/lib/dkms/mercury/0.1.0")?;
    assert_eq!(operator.mercury("attach")?["count"], 2);
    operator.mercury("detach").map(drop)
}

/// Purges the package while attached.
fn nothing_is_left(operator: &Operator, before: &HashSet<String>) -> Result<()> {
    operator.mercury("attach")?;
    operator.sh("dpkg --purge mercury")?;
    operator.say("purged");
    operator.sh("test ! -e /dev/mercury -a ! -e /sys/module/mercury -a ! -e /usr/sbin/mercury")?;
    operator.sh("! modinfo mercury 2>/dev/null; ! systemctl cat mercury 2>/dev/null")?;
    let after = operator.files()?;
    let left: Vec<&String> = after.difference(before).collect();
    assert!(left.is_empty(), "left behind: {left:#?}");
    operator.machine.check_health()
}

#[test]
#[ignore = "long"]
fn package_on_debian_12() -> Result<()> {
    let operator = Operator::boot(Kernel::BookwormCloud)?;
    let before = operator.files()?;
    // The old version's module is the lab's own build.
    operator.sh("touch /etc/dkms/no-autoinstall")?;
    operator.install(&deb::build()?)?;
    let prebuilt = "/mercury/lib/modules/$(uname -r)/mercury.ko";
    operator.sh(&format!("mkdir -p {MODULES} && cp {prebuilt} {MODULES} && depmod -a"))?;
    unit_loads_and_unloads(&operator)?;
    operator.sh(&format!("rm -r {MODULES} /etc/dkms/no-autoinstall"))?;
    upgrade_detaches(&operator)?;
    nothing_is_left(&operator, &before)
}

#[test]
#[ignore = "long"]
fn package_on_debian_13() -> Result<()> {
    let operator = Operator::boot(Kernel::TrixieCloud)?;
    let before = operator.files()?;
    operator.install(&deb::build()?)?;
    operator.check_dkms()?;
    documentation_is_there(&operator)?;
    kvm_goes_on(&operator)?;
    unit_loads_and_unloads(&operator)?;
    nothing_is_left(&operator, &before)
}
