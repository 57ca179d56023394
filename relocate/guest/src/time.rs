//! Clocks that KVM has, set to go on where the machine's own stopped.

use crate::fit::kvm_refused;
use kvm_bindings::{
    KVM_CAP_X86_APIC_BUS_CYCLES_NS, KVM_CAP_X86_DISABLE_EXITS, KVM_X86_DISABLE_EXITS_MWAIT, Msrs,
    kvm_enable_cap, kvm_msr_entry,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use mercury_control::error::Result;
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
}

impl Clock {
    /// Asks KVM, by a processor that executes nothing.
    ///
    /// # Errors
    /// KVM makes no guest.
    pub fn of(kvm: &Kvm) -> Result<Self> {
        let asked = kvm.create_vm().and_then(|vm| vm.create_vcpu(0)).and_then(|vcpu| vcpu.get_tsc_khz());
        let khz = asked.map_err(|error| kvm_refused("say how fast its clock is", error))?;
        Ok(Self { khz: khz.into(), scales: kvm.check_extension(Cap::TscControl) })
    }

    /// Returns the reason why the machine's time-stamp counter could not go on at its rate here.
    #[must_use]
    pub fn obstacle(self, timers: &Timers) -> Option<String> {
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
        let clock = |scales| Clock { khz: 2_500_000, scales };
        for khz in [2_000_000, 3_000_000] {
            let why = clock(false).obstacle(&timers(khz)).expect("refused");
            assert!(why.contains(&format!("runs at {khz} kHz, this host's at 2500000 kHz")), "{why}");
            assert_eq!(clock(true).obstacle(&timers(khz)), None);
        }
        assert_eq!([0, 2_500_100].map(|khz| clock(false).obstacle(&timers(khz))), [None, None]);
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
