from tiny_world.builder.__main__ import main

raise SystemExit(main())
