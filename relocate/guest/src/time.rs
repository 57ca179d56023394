//! Clocks that KVM has, set to go on where the machine's own stopped.

use crate::fit::kvm_refused;
use kvm_bindings::{
    KVM_CAP_X86_APIC_BUS_CYCLES_NS, KVM_CAP_X86_DISABLE_EXITS, KVM_X86_DISABLE_EXITS_MWAIT, Msrs,
    kvm_enable_cap, kvm_msr_entry,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use mercury_control::{error::Result, sysroot::Sysroot};
use mercury_image::{Machine, Timers};
use std::time::{SystemTime, UNIX_EPOCH};

/// The register of the time-stamp counter (SDM volume 3, 18.17).
const TSC: u32 = 0x10;
/// Rate of the timers of KVM's local APICs in Hz, unless it is told another one.
const APIC_HZ: u64 = 1_000_000_000;
/// Difference of two rates that a kernel's own calibration may have, in parts of APIC_HZ.
const TOLERANCE: u64 = 100;
/// Difference of clocks that a kernel does not notice, in parts of a million: its own calibration is no
/// better.
const CLOCK_TOLERANCE: u64 = 1000;
/// Name of Linux's clock source that is the time-stamp counter.
const CLOCK_SOURCE: &str = "tsc";
/// Flag of a processor that can wait for a write to memory.
const MONITOR: &str = "monitor";

/// Features of this host's KVM for clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Able {
    /// It runs the timers of local APICs at another rate.
    sets_apic_rate: bool,
    /// It lets a guest wait by MWAIT on the processor itself.
    waits_itself: bool,
}

impl Able {
    /// Asks KVM.
    #[must_use]
    pub fn of(kvm: &Kvm) -> Self {
        let extension = |number: u32| kvm.check_extension_raw(number.into());
        let exits = u32::try_from(extension(KVM_CAP_X86_DISABLE_EXITS)).unwrap_or(0);
        Self {
            sets_apic_rate: extension(KVM_CAP_X86_APIC_BUS_CYCLES_NS) > 0,
            waits_itself: exits & KVM_X86_DISABLE_EXITS_MWAIT != 0,
        }
    }
}

/// The time-stamp counter of this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Clock {
    /// Its rate in kHz.
    pub khz: u64,
    /// True if the processor can give a guest another rate. Without that, KVM may take a faster rate all the
    /// same, and time would go back between processors.
    pub scales: bool,
    /// True if it counts alike on all processors. Linux tests that, and takes it from its clock sources
    /// otherwise.
    pub is_stable: bool,
}

impl Clock {
    /// Asks KVM, by a processor that executes nothing.
    ///
    /// # Errors
    /// KVM makes no guest.
    pub fn of(kvm: &Kvm) -> Result<Self> {
        let asked = kvm.create_vm().and_then(|vm| vm.create_vcpu(0)).and_then(|vcpu| vcpu.get_tsc_khz());
        let khz = asked.map_err(|error| kvm_refused("say how fast its clock is", error))?;
        let is_stable = is_stable(&Sysroot::default());
        Ok(Self { khz: khz.into(), scales: kvm.check_extension(Cap::TscControl), is_stable })
    }

    /// Returns the reason why the time-stamp counter of a machine with so many processors could not go on
    /// here. KVM keeps the counter of one processor from going back, and not those of several to each other.
    #[must_use]
    pub fn obstacle(self, timers: &Timers, cpus: usize) -> Option<String> {
        if !self.is_stable && cpus > 1 && timers.clocksource == CLOCK_SOURCE {
            return Some(
                "its kernel takes the time from time-stamp counters that are alike, and those of this host's \
                 processors are not: time would go back between processors (`dmesg` has the host's reason at \
                 \"tsc\")"
                    .into(),
            );
        }
        let wanted = timers.tsc_khz;
        (wanted != 0 && !self.scales && differ(wanted, self.khz)).then(|| {
            format!(
                "its time-stamp counter runs at {wanted} kHz, this host's at {} kHz, and the processor \
                 cannot scale it",
                self.khz
            )
        })
    }
}

/// Returns true if the host's kernel offers the time-stamp counter as a clock source, or uses one that
/// depends on it. A host that does not say so is believed.
fn is_stable(sysroot: &Sysroot) -> bool {
    const FOLDER: &str = "sys/devices/system/clocksource/clocksource0";
    const BUILT_ON_IT: [&str; 3] = [CLOCK_SOURCE, "kvm-clock", "hyperv_clocksource_tsc_page"];
    let sources = |file: &str| sysroot.text(&format!("{FOLDER}/{file}"));
    let (Some(current), available) = (sources("current_clocksource"), sources("available_clocksource"))
    else {
        return true;
    };
    let is_offered = available.is_some_and(|all| all.split_whitespace().any(|one| one == CLOCK_SOURCE));
    is_offered || BUILT_ON_IT.contains(&current.trim())
}

fn differ(wanted: u64, here: u64) -> bool {
    wanted.abs_diff(here)
        > wanted / 1_000_000 * CLOCK_TOLERANCE + wanted % 1_000_000 * CLOCK_TOLERANCE / 1_000_000
}

/// Gives a processor's time-stamp counter the rate of the machine's, which its kernel goes on to use.
///
/// # Errors
/// KVM does not scale it.
pub fn set_rate(vcpu: &VcpuFd, machine: &Machine) -> Result<()> {
    let wrong = |error| kvm_refused("take the rate of the machine's time-stamp counter", error);
    let Some(wanted) = machine.timers.as_ref().map(|timers| timers.tsc_khz).filter(|khz| *khz != 0) else {
        return Ok(());
    };
    if !differ(wanted, vcpu.get_tsc_khz().map_err(wrong)?.into()) {
        return Ok(());
    }
    // A rate that is no number for KVM is refused by it.
    vcpu.set_tsc_khz(u32::try_from(wanted).unwrap_or(u32::MAX)).map_err(wrong)
}

/// Returns the milliseconds by which the RTC of a machine is ahead of this host's time, whose description has
/// just come. So it goes on as the RTC of the source does, whatever the time of this host is. `None`: an
/// earlier Mercury did not record the machine's time.
#[must_use]
pub fn clock_ahead_ms(timers: &Timers, now: SystemTime) -> Option<i64> {
    let now = i64::try_from(now.duration_since(UNIX_EPOCH).ok()?.as_millis()).ok()?;
    let theirs = i64::try_from(timers.real_ms).ok().filter(|ms| *ms != 0)?;
    Some(theirs.saturating_add(timers.rtc_ahead_ms).saturating_sub(now))
}

/// Returns the reason why the machine's timers would be late here.
///
/// A timer that is early is none: the kernel reads its clock, sees the time that is left, and sets the timer
/// again.
#[must_use]
pub fn obstacle(timers: &Timers) -> Option<String> {
    let mhz = |hz: u64| hz / 1_000_000;
    (timers.apic_hz > APIC_HZ + APIC_HZ / TOLERANCE).then(|| {
        format!(
            "the timers of its local APICs count at {} MHz, and those of KVM at {}: all timers would be late",
            mhz(timers.apic_hz),
            mhz(APIC_HZ)
        )
    })
}

/// Returns the nanoseconds of a cycle of the local APICs' timers, rounded so that no timer is late. `None`
/// if KVM's own rate is right, or nothing else can be done.
fn apic_cycle(timers: &Timers, able: Able) -> Option<u64> {
    let cycle = APIC_HZ.checked_div(timers.apic_hz)?;
    (able.sets_apic_rate && cycle > 1).then_some(cycle)
}

/// Tells KVM about the machine's timers and the way in which its kernel waits, before there is a processor.
///
/// # Errors
/// KVM refuses what it has offered.
pub fn prepare(vm: &VmFd, machine: &Machine, able: Able) -> Result<()> {
    let enable = |cap, argument| {
        let mut cap = kvm_enable_cap { cap, ..kvm_enable_cap::default() };
        cap.args[0] = argument;
        vm.enable_cap(&cap).map_err(|error| kvm_refused("set the clocks of a guest", error))
    };
    if let Some(cycle) = machine.timers.as_ref().and_then(|timers| apic_cycle(timers, able)) {
        enable(KVM_CAP_X86_APIC_BUS_CYCLES_NS, cycle)?;
    }
    // Without this, KVM takes MWAIT as an instruction that does nothing, and an idle guest spins.
    if able.waits_itself && machine.processor.flags.iter().any(|flag| flag == MONITOR) {
        enable(KVM_CAP_X86_DISABLE_EXITS, KVM_X86_DISABLE_EXITS_MWAIT.into())?;
    }
    Ok(())
}

/// Lets the time-stamp counters of all processors go on from the instant. All get the same value at nearly
/// the same time, from which KVM knows that they belong together.
///
/// # Errors
/// KVM does not set a counter.
pub fn go_on(processors: &[VcpuFd], timers: Option<&Timers>) -> Result<()> {
    let Some(data) = timers.map(|timers| timers.tsc).filter(|tsc| *tsc != 0) else { return Ok(()) };
    let entry = kvm_msr_entry { index: TSC, data, ..kvm_msr_entry::default() };
    let registers =
        Msrs::from_entries(&[entry]).map_err(|error| kvm_refused("list a register", format!("{error:?}")))?;
    for processor in processors {
        let set = processor
            .set_msrs(&registers)
            .map_err(|error| kvm_refused("set the time-stamp counter", error))?;
        if set != 1 {
            return Err(kvm_refused("set the time-stamp counter", "it does not know the register"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timers(apic_hz: u64) -> Timers {
        Timers { apic_hz, ..Timers::default() }
    }

    #[test]
    fn clocks_differ_by_more_than_a_thousandth() {
        assert!(!differ(3_000_000, 3_002_999) && !differ(3_000_000, 2_997_001) && !differ(999_000, 999_900));
        assert!(differ(3_000_000, 3_003_001) && differ(3_000_000, 2_400_000) && differ(1_000, 1_002));
    }

    /// Refuses what KVM alone would take, by catching up with a faster clock.
    #[test]
    fn a_counter_of_another_rate_needs_a_processor_that_scales() {
        let timers = |tsc_khz| Timers { tsc_khz, ..Timers::default() };
        let clock = |scales| Clock { khz: 2_500_000, scales, is_stable: true };
        for khz in [2_000_000, 3_000_000] {
            let why = clock(false).obstacle(&timers(khz), 2).expect("refused");
            assert!(why.contains(&format!("runs at {khz} kHz, this host's at 2500000 kHz")), "{why}");
            assert_eq!(clock(true).obstacle(&timers(khz), 2), None);
        }
        assert_eq!([0, 2_500_100].map(|khz| clock(false).obstacle(&timers(khz), 2)), [None, None]);
    }

    #[test]
    fn counters_that_differ_are_for_one_processor_alone() {
        let timers = |source: &str| Timers { clocksource: source.into(), ..Timers::default() };
        let clock = |is_stable| Clock { khz: 2_500_000, scales: false, is_stable };
        let why = clock(false).obstacle(&timers("tsc"), 2).expect("refused");
        assert!(why.contains("time would go back between processors"), "{why}");
        let fits = [(true, "tsc", 2), (false, "tsc", 1), (false, "hpet", 2)];
        assert!(
            fits.iter()
                .all(|(stable, source, cpus)| { clock(*stable).obstacle(&timers(source), *cpus).is_none() })
        );
    }

    #[test]
    fn a_host_without_the_counter_among_its_clock_sources_has_no_stable_one() {
        for (current, available, expected) in [
            ("tsc", "tsc hpet acpi_pm", true),
            ("hpet", "tsc hpet acpi_pm", true),
            ("kvm-clock", "kvm-clock acpi_pm", true),
            ("hpet", "hpet acpi_pm", false),
        ] {
            let root = tempfile::tempdir().expect("a folder");
            let folder = root.path().join("sys/devices/system/clocksource/clocksource0");
            std::fs::create_dir_all(&folder).expect("a folder");
            std::fs::write(folder.join("current_clocksource"), format!("{current}\n")).expect("a file");
            std::fs::write(folder.join("available_clocksource"), format!("{available} \n")).expect("a file");
            assert_eq!(is_stable(&Sysroot::at(root.path())), expected, "{current}");
        }
        assert!(is_stable(&Sysroot::at("/nowhere")));
    }

    #[test]
    fn the_rtc_of_a_machine_that_moves_goes_on_from_its_own_time() {
        let now = UNIX_EPOCH + std::time::Duration::from_millis(5_000_500);
        let ahead = |real_ms, rtc_ahead_ms| {
            clock_ahead_ms(&Timers { real_ms, rtc_ahead_ms, ..Timers::default() }, now)
        };
        assert_eq!(ahead(5_000_500, 0), Some(0));
        assert_eq!(ahead(5_000_400, 7_200_000), Some(7_199_900));
        assert_eq!(ahead(1_400_500, -2000), Some(-3_602_000));
        assert_eq!(ahead(0, 9), None);
        assert_eq!(ahead(u64::MAX, i64::MAX), None);
    }

    #[test]
    fn no_timer_is_late() {
        let able = Able { sets_apic_rate: true, ..Able::default() };
        // The kernel's rate, and KVM's cycle in nanoseconds.
        for (hz, cycle) in [
            (0, None),
            (1_000_000_000, None),
            (999_600_000, None),
            (1_009_000_000, None),
            (100_000_000, Some(10)),
            (99_990_000, Some(10)),
            (24_000_000, Some(41)),
            (200_100_000, Some(4)),
        ] {
            assert_eq!(apic_cycle(&timers(hz), able), cycle, "{hz}");
            assert_eq!(apic_cycle(&timers(hz), Able::default()), None);
            assert!(cycle.is_none_or(|cycle| 1_000_000_000 / cycle >= hz));
            assert_eq!(obstacle(&timers(hz)), None);
        }
        assert!(obstacle(&timers(1_100_000_000)).is_some_and(|why| why.contains("at 1100 MHz")));
    }
}
