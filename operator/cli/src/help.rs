//! The command line's help: groups of commands, examples, colours.
//!
//! [`crate::args`] defines options; [`crate::pages`] has the rest of what help and manual pages say.
//! [`command`] joins them.

use crate::{
    args::{self, Cli},
    pages::{Example, Group, members, page},
};
use anstyle::Style;
use clap::{
    Command, CommandFactory, FromArgMatches, Parser, Subcommand,
    builder::{StyledStr, Styles},
    error::{ContextKind, ContextValue},
};
use mercury_control::{
    exit,
    output::{Tone, WIDTH_MAX, terminal_width},
};
use mercury_hosted_options::{HostedCommand, disco::DiscoCommand};
use std::{env, ffi::OsString, io::stdout};

/// Reads the command line. Ends the process with the help that the user asked for, or with an error
/// in the line.
#[must_use]
pub fn parse() -> Cli {
    read(env::args_os().collect()).unwrap_or_else(|error| error.exit())
}

fn read(words: Vec<OsString>) -> Result<Cli, clap::Error> {
    if let Ok(HostedCli { json, command }) = HostedCli::try_parse_from(&words) {
        let command = match command {
            HostedCommands::Hosted(command) => args::Command::Hosted(command),
            HostedCommands::Disco(command) => args::Command::Disco(command),
        };
        return Ok(Cli { json, command });
    }
    // Pages for all commands take milliseconds. They are made when one is shown.
    if let Ok(matches) = Cli::command().try_get_matches_from(&words) {
        return Cli::from_arg_matches(&matches);
    }
    let mut command = command();
    let error = match command.try_get_matches_from_mut(&words) {
        Ok(matches) => return Cli::from_arg_matches(&matches),
        Err(error) => error,
    };
    Err(without_hidden(error, &command, &words))
}

/// The commands for hosted machines alone. All commands take longer to define than a clone to begin work, and
/// what these do not understand is read by the full definition.
#[derive(Debug, Parser)]
#[command(disable_help_flag = true)]
struct HostedCli {
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: HostedCommands,
}

#[derive(Debug, Subcommand)]
enum HostedCommands {
    #[command(subcommand)]
    Hosted(HostedCommand),
    #[command(subcommand)]
    Disco(DiscoCommand),
}

/// Returns the definition of the command line with its help.
#[must_use]
pub fn command() -> Command {
    let mut command = Cli::command().styles(styles());
    command.build();
    let template = template(&command, terminal_width(&stdout()).unwrap_or(WIDTH_MAX));
    with_pages(command, "").help_template(template)
}

fn styles() -> Styles {
    let heading = Tone::Strong.style();
    Styles::styled()
        .header(heading)
        .usage(heading)
        .literal(Tone::Good.style())
        .placeholder(Style::new())
        .error(Tone::Bad.style().bold())
        .invalid(Tone::Doubtful.style())
        .valid(Tone::Good.style())
}

/// Adds examples to the command and to all below it. A usage line names no option, neither hidden
/// nor not.
fn with_pages(command: Command, name: &str) -> Command {
    let usage = usage(&command);
    let examples = page(name).map(|page| examples(page.examples)).unwrap_or_default();
    let after = if name.is_empty() { format!("{examples}\n\n{}", exit::TABLE) } else { examples };
    let command = command.override_usage(usage).after_help(StyledStr::from(after));
    let full = |sub: &str| format!("{name} {sub}").trim_start().to_owned();
    command.mut_subcommands(|sub| {
        let name = full(sub.get_name());
        with_pages(sub, &name)
    })
}

/// Returns the usage as the help shows it, without its heading.
fn usage(command: &Command) -> StyledStr {
    let styled = command.clone().render_usage().ansi().to_string();
    let (_, usage) = styled.split_once("Usage:").unwrap_or(("", &styled));
    // The heading's style ends after the heading.
    let reset = format!("{:#}", Tone::Strong.style());
    StyledStr::from(usage.strip_prefix(&reset).unwrap_or(usage).trim().to_owned())
}

fn examples(examples: &[Example]) -> String {
    let heading = Tone::Strong.style();
    let literal = Tone::Good.style();
    let example =
        |example: &Example| format!("\n  {}:\n    {literal}{}{literal:#}", example.purpose, example.line);
    let lines = examples.iter().map(example).collect::<String>();
    if lines.is_empty() { lines } else { format!("{heading}Examples:{heading:#}{lines}") }
}

/// Returns the form of `mercury --help`: clap knows no groups of commands.
fn template(command: &Command, width: usize) -> StyledStr {
    let heading = Tone::Strong.style();
    let names = command.get_subcommands().filter(|sub| !sub.is_hide_set()).map(|sub| sub.get_name().len());
    let longest = names.max().unwrap_or(0);
    let groups = Group::ALL.map(|group| {
        let list = list(&members(command, group), longest, width);
        format!("{heading}{}:{heading:#}\n{list}\n", group.heading())
    });
    let options = format!("{heading}Options:{heading:#}");
    let head = "{before-help}{about-with-newline}\n{usage-heading} {usage}\n\n";
    StyledStr::from(format!("{head}{}\n{options}\n{{options}}{{after-help}}\n", groups.join("\n")))
}

/// Lists commands with their purpose; their names have room for `longest` letters.
fn list(commands: &[&Command], longest: usize, width: usize) -> String {
    let literal = Tone::Good.style();
    let line = |sub: &&Command| {
        let name = format!("  {literal}{:longest$}{literal:#}  ", sub.get_name());
        let indent = " ".repeat(longest + 4);
        let options = textwrap::Options::new(width).initial_indent(&name).subsequent_indent(&indent);
        textwrap::fill(&sub.get_about().map(ToString::to_string).unwrap_or_default(), options)
    };
    commands.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Removes hidden options and commands from the suggestions of an error.
fn without_hidden(mut error: clap::Error, command: &Command, words: &[OsString]) -> clap::Error {
    let at = asked_for(command, words);
    if let Some(ContextValue::String(name)) = error.get(ContextKind::SuggestedArg) {
        let is_shown =
            |arg: &clap::Arg| !arg.is_hide_set() && arg.get_long() == Some(name.trim_start_matches("--"));
        if !at.get_arguments().any(is_shown) {
            error.remove(ContextKind::SuggestedArg);
        }
    }
    if let Some(ContextValue::Strings(names)) = error.get(ContextKind::SuggestedSubcommand) {
        let is_shown = |name: &String| at.find_subcommand(name).is_some_and(|sub| !sub.is_hide_set());
        let shown: Vec<String> = names.iter().filter(|name| is_shown(name)).cloned().collect();
        error.remove(ContextKind::SuggestedSubcommand);
        if !shown.is_empty() {
            error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(shown));
        }
    }
    error
}

/// Finds the command, or the command below it, that the words name.
fn asked_for<'a>(command: &'a Command, words: &[OsString]) -> &'a Command {
    let named = words.iter().skip(1).filter_map(|word| word.to_str());
    named.fold(command, |command, word| command.find_subcommand(word).unwrap_or(command))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::PAGES;

    fn visible(command: &Command) -> impl Iterator<Item = &Command> {
        command.get_subcommands().filter(|sub| !sub.is_hide_set())
    }

    /// Collects all commands that help shows, with the words after `mercury`. The command `help`
    /// repeats them.
    fn all<'a>(command: &'a Command, name: &str, into: &mut Vec<(String, &'a Command)>) {
        into.push((name.to_owned(), command));
        for sub in visible(command).filter(|sub| sub.get_name() != "help") {
            all(sub, format!("{name} {}", sub.get_name()).trim_start(), into);
        }
    }

    /// Splits a line of a shell into words, up to the first `|`, `;` or `&&`.
    fn words(line: &str) -> Vec<OsString> {
        let mut words = vec![String::new()];
        let mut is_quoted = false;
        for letter in line.split(['|', ';', '&']).next().unwrap_or_default().trim().chars() {
            match letter {
                '\'' => is_quoted = !is_quoted,
                ' ' if !is_quoted => words.push(String::new()),
                letter => words.last_mut().expect("a word").push(letter),
            }
        }
        words.into_iter().map(OsString::from).collect()
    }

    fn said(words: &[&str]) -> String {
        let error = read(words.iter().map(OsString::from).collect()).expect_err("wrong usage");
        error.render().to_string()
    }

    #[test]
    fn commands_for_hosted_machines_are_read_as_by_the_full_definition() {
        for line in [
            "mercury disco run tt --count 32 --json",
            "mercury --json hosted run --kernel vmlinux --memory 256 --append quiet",
            "mercury disco list",
            "mercury hosted save control file",
        ] {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            assert!(HostedCli::try_parse_from(&words).is_ok(), "{line}");
            let full = format!("{:?}", Cli::try_parse_from(&words));
            assert_eq!(format!("{:?}", read(words)), full, "{line}");
        }
        for line in ["mercury status", "mercury disco run --help", "mercury hosted"] {
            assert!(HostedCli::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }

    #[test]
    fn each_visible_command_is_in_exactly_one_group() {
        let command = command();
        for sub in visible(&command) {
            let groups = Group::ALL.iter().filter(|group| {
                members(&command, **group).iter().any(|member| member.get_name() == sub.get_name())
            });
            assert_eq!(groups.count(), 1, "{}", sub.get_name());
        }
        let listed: usize = Group::ALL.iter().map(|group| members(&command, *group).len()).sum();
        assert_eq!(listed, visible(&command).count());
    }

    #[test]
    fn each_page_is_that_of_a_visible_command_and_each_has_one() {
        let command = command();
        let mut commands = Vec::new();
        all(&command, "", &mut commands);
        let mut names: Vec<&str> = commands.iter().map(|(name, _)| name.as_str()).collect();
        let mut pages: Vec<&str> = PAGES.iter().map(|page| page.command).collect();
        names.sort_unstable();
        pages.sort_unstable();
        assert_eq!(names, pages);
    }

    #[test]
    fn examples_are_shown_and_parse() {
        let command = command();
        let mut commands = Vec::new();
        all(&command, "", &mut commands);
        for (name, command) in commands {
            let help = command.clone().render_help().to_string();
            let examples = page(&name).expect("a page").examples;
            assert!(!examples.is_empty(), "{name}");
            for example in examples {
                assert!(help.contains(example.line), "{name}: {help}");
                assert!(!example.purpose.ends_with(['.', '?', ':']), "{}", example.purpose);
                let words = words(example.line);
                // The other programs of examples.
                if words[0] != "systemctl" {
                    assert_eq!(words[0], "mercury");
                    read(words).unwrap_or_else(|error| panic!("{}: {error}", example.line));
                }
            }
        }
    }

    #[test]
    fn the_help_has_groups_within_the_width() {
        let mut command = command();
        let help = command.render_long_help().to_string();
        for group in Group::ALL {
            assert!(help.contains(&format!("\n{}:\n", group.heading())), "{help}");
        }
        assert!(help.contains("Exit status:") && help.contains("Examples:"), "{help}");
        let narrow = template(&command, 60).to_string();
        let is_list = |line: &&str| line.starts_with("  ");
        assert!(narrow.lines().filter(is_list).all(|line| line.chars().count() <= 60), "{narrow}");
    }

    #[test]
    fn errors_suggest_nothing_that_is_hidden() {
        let said = |line: &str| said(&line.split(' ').collect::<Vec<_>>());
        assert!(said("mercury migrat").contains("'migrate'"));
        assert!(said("mercury attach --unload-kv").contains("'--unload-kvm'"));
        for line in [
            "mercury faul",
            "mercury und",
            "mercury migrate --pause",
            "mercury migrate --verify",
            "mercury checkpoint --hash",
            "mercury tombstone --at",
            "mercury receive --her",
        ] {
            let said = said(line);
            assert!(!said.contains("similar"), "{said}");
            assert!(said.contains("Usage: mercury"), "{said}");
        }
    }

    #[test]
    fn usage_lines_name_no_hidden_option() {
        let command = command();
        let mut commands = Vec::new();
        all(&command, "", &mut commands);
        for (name, sub) in &commands {
            let hidden = sub.get_arguments().filter(|arg| arg.is_hide_set()).filter_map(clap::Arg::get_long);
            let hidden: Vec<String> = hidden.map(|long| format!("--{long}")).collect();
            for long in sub.get_arguments().filter_map(clap::Arg::get_long) {
                let line = format!("mercury {name} --{long} --{long}");
                let words = line.split_whitespace().map(OsString::from).collect();
                let Err(error) = read(words) else { continue };
                let said = error.render().to_string();
                let usage = said.lines().filter(|line| line.starts_with("Usage:")).collect::<String>();
                assert!(!hidden.iter().any(|option| usage.contains(option)), "{line}: {said}");
            }
        }
    }
}
