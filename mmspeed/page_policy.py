"""The Content-Security-Policy of the pages that mmspeed writes."""

from __future__ import annotations

# everything is in the page itself: no script runs, nothing is fetched, no form is sent
PAGE_POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "media-src data:; base-uri 'none'; form-action 'none'\">"
)
