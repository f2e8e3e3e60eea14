//! Splits a URL into parts that are safe to show: the store and the host, but never a password.

/// A URL whose secrets are known, so that the rest can be shown.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Address<'a> {
    scheme: &'a str,
    user: Option<&'a str>,
    has_password: bool,
    hosts: &'a str,
    path: &'a str,
    query: &'a str,
}

impl<'a> Address<'a> {
    /// Parses a URL. Returns `None` if it is ambiguous, because showing a part of it could then
    /// reveal a password.
    pub(crate) fn parse(url: &'a str) -> Option<Self> {
        let (scheme, rest) = url.split_once(':')?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let Some(rest) = rest.strip_prefix("//") else {
            let is_file = matches!(scheme, "sqlite" | "memory");
            return is_file.then_some(Self::file(scheme, rest, query));
        };
        if scheme == "sqlite" {
            return Some(Self::file(scheme, rest, query));
        }
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        // A slash or a question mark in a password ends the authority before the @.
        if path.contains('@') || query.contains('@') || rest.contains('#') || query.contains('#') {
            return None;
        }
        let (user, hosts) = match authority.rsplit_once('@') {
            Some((user, hosts)) => (Some(user), hosts),
            None => (None, authority),
        };
        if !hosts.split(',').all(is_host) {
            return None;
        }
        let has_password = user.is_some_and(|user| user.contains(':'));
        let user = user.map(|user| user.split(':').next().unwrap_or_default());
        Some(Self { scheme, user, has_password, hosts, path, query })
    }

    fn file(scheme: &'a str, path: &'a str, query: &'a str) -> Self {
        Self { scheme, user: None, has_password: false, hosts: "", path, query }
    }

    /// Returns the name of the store for messages.
    pub(crate) fn place(&self) -> String {
        let product = self.product();
        match (self.scheme, self.hosts) {
            ("memory", _) => "memory of this process".to_owned(),
            ("sqlite", _) => format!("{product} file {}", self.path),
            ("firestore", project) => format!("{product} project {project}"),
            (_, "") => format!("{product} at {}", self.path),
            (_, hosts) => format!("{product} at {hosts}"),
        }
    }

    /// Returns the name of the product.
    pub(crate) fn product(&self) -> &'a str {
        match self.scheme.split('+').next().unwrap_or_default() {
            "postgres" | "postgresql" => "PostgreSQL",
            "redis" | "rediss" | "valkey" | "valkeys" | "unix" => "Redis",
            "firestore" => "Firestore",
            "sqlite" => "SQLite",
            other => other,
        }
    }

    /// Returns the host if it is the only one and its name does not resolve. Queries the resolver.
    pub(crate) fn unresolved_host(&self) -> Option<&'a str> {
        let is_network = !matches!(self.scheme, "firestore" | "memory" | "sqlite");
        let host = self.hosts.split(':').next().filter(|host| !host.is_empty())?;
        let is_name = !self.hosts.contains(['[', ',', '%']);
        let is_unknown = || std::net::ToSocketAddrs::to_socket_addrs(&(host, 0)).is_err();
        (is_network && is_name && is_unknown()).then_some(host)
    }

    /// Returns whether the URL contains a password or another secret.
    pub(crate) fn has_secret(&self) -> bool {
        self.has_password || self.options().any(|(name, _)| is_secret(name))
    }

    /// Returns the URL with its secrets replaced by `***`.
    pub(crate) fn redacted(&self) -> String {
        if matches!(self.scheme, "sqlite" | "memory") && self.user.is_none() {
            let query = self.redacted_query();
            return format!("{}:{}{query}", self.scheme, self.path);
        }
        let user = match (self.user, self.has_password) {
            (None, _) => String::new(),
            (Some(user), true) => format!("{user}:***@"),
            (Some(user), false) => format!("{user}@"),
        };
        let Self { scheme, hosts, path, .. } = self;
        format!("{scheme}://{user}{hosts}{path}{}", self.redacted_query())
    }

    fn redacted_query(&self) -> String {
        let shown: Vec<String> =
            self.options()
                .map(|(name, value)| {
                    if is_secret(name) { format!("{name}=***") } else { format!("{name}={value}") }
                })
                .collect();
        if shown.is_empty() { String::new() } else { format!("?{}", shown.join("&")) }
    }

    fn options(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        let query = self.query.split('&').filter(|option| !option.is_empty());
        query.map(|option| option.split_once('=').unwrap_or((option, "")))
    }
}

fn is_secret(option: &str) -> bool {
    option.contains("pass") || option.contains("secret") || option.contains("token")
}

/// Returns whether the text is a host with an optional port, and nothing else.
fn is_host(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !text.ends_with(']') => (host, port),
        _ => (text, ""),
    };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    let is_named = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(address) => {
            address.bytes().all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte))
        }
        // A percent-encoded directory of a socket, as in libpq.
        None => host.replace("%2F", "").replace("%2f", "").bytes().all(is_name),
    };
    is_named && port.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_shown_without_passwords() {
        for (url, place, redacted) in [
            ("redis://:canary@host:7/0", "Redis at host:7", "redis://:***@host:7/0"),
            (
                "redis+sentinel://u:canary@a:1,b:2/s",
                "Redis at a:1,b:2",
                "redis+sentinel://u:***@a:1,b:2/s",
            ),
            ("postgres://u@[::1]:5/db?x=1", "PostgreSQL at [::1]:5", "postgres://u@[::1]:5/db?x=1"),
            (
                "postgres://h/db?password=canary&y=2",
                "PostgreSQL at h",
                "postgres://h/db?password=***&y=2",
            ),
            ("sqlite:/a b/c.db", "SQLite file /a b/c.db", "sqlite:/a b/c.db"),
            ("sqlite:///a/c.db", "SQLite file /a/c.db", "sqlite:/a/c.db"),
            ("firestore://shop/db", "Firestore project shop", "firestore://shop/db"),
            (
                "redis+unix:///run/redis.sock",
                "Redis at /run/redis.sock",
                "redis+unix:///run/redis.sock",
            ),
            ("memory:", "memory of this process", "memory:"),
        ] {
            let address = Address::parse(url).expect(url);
            assert_eq!(address.place(), place);
            assert_eq!(address.redacted(), redacted);
            assert_eq!(address.has_secret(), url.contains("canary"), "{url}");
        }
    }

    #[test]
    fn ambiguous_urls_are_not_parsed() {
        for url in [
            "redis://user:can/ary@host/0",
            "redis://user:12/canary@host/0",
            "redis://user:canary?x@host/0",
            "redis://user:canary",
            "redis://h/0#canary",
            "canary",
        ] {
            assert_eq!(Address::parse(url), None, "{url}");
        }
    }
}
