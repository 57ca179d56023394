//! The network around the instant: which life of the machine may talk.

use super::{
    once::{Once, Return},
    target::Target,
};
use crate::options::CheckpointOptions;
use mercury_control::{
    device::{Device, Silent},
    error::{Error, Result},
    exit::Exit,
    monitor::is_guest,
    sysroot::Sysroot,
};
use mercury_image::Identity;
use mercury_quiesce::{
    fence,
    stale::{Connections, Stale},
    this_process::keep_in_memory,
};

/// The state of the network.
#[derive(Debug, Default)]
pub(super) struct Fenced {
    /// Reason why the network is not fenced off, if it should be.
    pub(super) unfenced: Option<String>,
    /// Connections that are used after the instant, and have to end in the restored machine.
    pub(super) stale: Option<Stale>,
    /// The machine that is silent after the instant.
    pub(super) silent: Silent,
    /// With a first life that says nothing: the note of the return.
    once: Option<Once>,
}

impl Fenced {
    /// Ends the connections that an earlier life has used, in the restored machine and before their
    /// packets go out. Returns the reason if those end that should go on.
    pub(super) fn has_returned(&mut self, device: &Device, sysroot: &Sysroot) -> Result<Option<String>> {
        self.stale.iter_mut().for_each(|stale| stale.end(sysroot));
        let Some(once) = &mut self.once else { return device.fence_down_afresh().map(|()| None) };
        // A guest does not reach the image.
        let note = |once: &Once| if is_guest() { Return::First } else { once.note() };
        let end_all = |once: &mut Once, why| {
            once.all.iter_mut().for_each(|all| all.end(sysroot));
            Ok(Some(format!("connections with other machines were ended, because {why}")))
        };
        match once.is_at_hand().then(|| note(once)) {
            Some(Return::First) if once.is_alone => device.fence_down().map(|()| None),
            Some(Return::Again(why)) if once.is_alone => {
                let ended = end_all(once, why);
                device.fence_down_afresh().and(ended)
            }
            early => {
                // With peers the root may be behind the fence, and to search all namespaces takes paths.
                device.fence_down_afresh()?;
                match early.unwrap_or_else(|| note(once)) {
                    Return::First => Ok(None),
                    Return::Again(why) => end_all(once, why),
                }
            }
        }
    }

    /// Returns true if the machine ends its connections whenever it comes back.
    pub(super) fn ends_connections(&self) -> bool {
        self.once.is_none()
    }

    /// Takes the fence away, in the machine that runs on.
    pub(super) fn runs_on(&self, device: &Device) -> Result<()> {
        if self.silent == Silent::Second { device.fence_down() } else { Ok(()) }
    }
}

/// Prepares the silence of a restored machine. The machine that runs on after the instant talks,
/// and a restored one must not send the same packets again with the same keys.
pub(super) fn silence_second_life(
    device: &Device,
    unfenced: Option<String>,
    sysroot: &Sysroot,
) -> Result<Fenced> {
    keep_in_memory()?;
    let stale = Stale::prepare(Connections::All).ok();
    // A kernel without hooks for packets ends connections as early as it can. So does a machine
    // whose files come from a server: even a look-up of /proc may ask the server of the root.
    let fenced = !fence::has_servers(sysroot) && device.fence(&[], Silent::Second).is_ok();
    let silent = if fenced { Silent::Second } else { Silent::Both };
    Ok(Fenced { unfenced, stale, silent, once: None })
}

/// Fences off a machine that stands still until it is off, so that it neither sends nor receives.
/// If that is impossible the result has the reason.
pub(super) fn raise_fence(
    args: &CheckpointOptions,
    device: &Device,
    target: &Target,
    identity: Identity,
    sysroot: &Sysroot,
) -> Result<Fenced> {
    if !args.poweroff || args.no_fence {
        return silence_second_life(device, None, sysroot);
    }
    let parent = args.incremental.iter().flatten().map(std::path::PathBuf::as_path);
    // This command looks paths up: at a server, if the root is there.
    let root = std::path::Path::new("/");
    let files: Vec<_> = target.part().into_iter().chain(parent).chain([root]).collect();
    let unfenced = |why| {
        format!(
            "the network was not fenced off, because {why}: connections on which a peer sent something after \
             the instant will not survive"
        )
    };
    let peers = match fence::peers(&files, &target.carriers(), sysroot) {
        Ok(peers) => peers,
        Err(why) => return silence_second_life(device, Some(unfenced(why)), sysroot),
    };
    let once = Once::prepare(&args.image, identity, peers.is_empty()).map_err(|error| {
        Error::new(Exit::Failed, format!("{} cannot be opened: {error}", args.image))
            .hint("nothing was changed; see in `dmesg` what its disk says, and try again")
    })?;
    keep_in_memory()?;
    // The machine that comes back is silent until it has noted that.
    let silent = Silent::Both;
    device.fence(&peers.iter().copied().map(Into::into).collect::<Vec<_>>(), silent)?;
    // Without this the connections end after minutes.
    let stale = if peers.is_empty() { None } else { Stale::prepare(Connections::WithPeers(peers)).ok() };
    Ok(Fenced { unfenced: None, stale, silent, once: Some(once) })
}
